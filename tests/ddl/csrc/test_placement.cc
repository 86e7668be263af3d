#include "base/status.h"
#include "check.h"
#include "schedule/placement.h"

using namespace ddl;

namespace {

const Options kDefault = parse_options("");

}  // namespace

TEST("ranks on a host are counted among themselves") {
    const Placement placement = place({"b", "a", "b", "c", "a", "b"});
    CHECK_EQ(placement.num_hosts, 3);
    CHECK_EQ(placement.local_rank(0), 0);
    CHECK_EQ(placement.local_rank(2), 1);
    CHECK_EQ(placement.local_rank(5), 2);
    CHECK_EQ(placement.local_size(5), 3);
    CHECK_EQ(placement.local_size(3), 1);
    CHECK(placement.host_order() == std::vector<int>({0, 2, 5, 1, 4, 3}));
}

TEST("the plan is ranks a host by hosts, in host order, however they are dealt") {
    const Plan plan = plan_of(kDefault, place({"a", "b", "a", "b", "a", "b"}));
    CHECK_EQ(format_mode(plan), "r:3x2");
    CHECK(plan.ranks == std::vector<int>({0, 2, 4, 1, 3, 5}));
}

TEST("dimensions that are asked for are laid over the ranks in host order") {
    const Plan plan = plan_of(parse_options("-mode p:2x2x1"), place({"a", "b", "a", "b"}));
    CHECK_EQ(format_mode(plan), "r:2x2");
    CHECK(plan.ranks == std::vector<int>({0, 2, 1, 3}));
    CHECK_CONTAINS(plan.reason, "as DDL_OPTIONS asks");
}

TEST("uneven hosts give one ring in host order, with the reason") {
    const Plan plan = plan_of(kDefault, place({"a", "b", "a"}));
    CHECK_EQ(format_mode(plan), "r:3");
    CHECK(plan.ranks == std::vector<int>({0, 2, 1}));
    CHECK_CONTAINS(plan.reason, "uneven");
}

TEST("one host, and one rank, need no second dimension") {
    CHECK_EQ(format_mode(plan_of(kDefault, place({"a", "a", "a"}))), "r:3");
    CHECK_EQ(format_mode(plan_of(kDefault, place({"a"}))), "r:1");
}

TEST("the modes that are asked for are the plan's, and p stands for rings") {
    CHECK_EQ(format_mode(plan_of(parse_options("-mode m"), place({"a", "b"}))), "m:2");
    CHECK_EQ(format_mode(plan_of(parse_options("-mode nbpm:2x2x2x2"), place(std::vector<std::string>(16, "a")))),
             "nbrm:2x2x2x2");
    const auto message = check::message_of<Error>([] { plan_of(parse_options("-mode r:3"), place({"a", "b"})); });
    CHECK_CONTAINS(message, "multiply to 3, but there are 2 ranks");
}
