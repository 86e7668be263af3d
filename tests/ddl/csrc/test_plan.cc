#include "base/status.h"
#include "check.h"
#include "schedule/options.h"
#include "schedule/plan.h"

using namespace ddl;

namespace {

std::string refusal(const std::function<void()>& body) { return check::message_of<Error>(body); }

}  // namespace

TEST("dimensions that do not multiply to the ranks name both numbers") {
    const std::string text = refusal([] { make_plan(12, {4, 2}, "r"); });
    CHECK_CONTAINS(text, "4x2 multiply to 8");
    CHECK_CONTAINS(text, "12 ranks");
    CHECK(!refusal([] { make_plan(4, {1 << 30, 1 << 30, 4}, "r"); }).empty());  // a product that overflows
}

TEST("a plan has one mode for all dimensions or one for each, of known letters") {
    CHECK_EQ(make_plan(8, {4, 2}, "r").modes, std::string("rr"));
    CHECK_EQ(make_plan(8, {4, 2}, "bn").modes, std::string("bn"));
    CHECK_CONTAINS(refusal([] { make_plan(8, {4, 2}, "bnr"); }), "3 letters for 2 dimensions");
    CHECK_CONTAINS(refusal([] { make_plan(8, {4, 2}, "x"); }), "unknown mode 'x'");
}

TEST("coordinates are read innermost first") {
    const Plan plan = make_plan(24, {4, 3, 2}, "r");
    CHECK_EQ(plan.stride(2), 12);
    CHECK_EQ(plan.coordinate(23, 0), 3);
    CHECK_EQ(plan.coordinate(23, 1), 2);
    CHECK_EQ(plan.coordinate(23, 2), 1);
}

TEST("an order of ranks that is no permutation is refused") {
    CHECK_CONTAINS(refusal([] { make_plan(2, {2}, "r", {0, 0}); }), "rank 0 twice");
    CHECK_CONTAINS(refusal([] { make_plan(2, {2}, "r", {0, 2}); }), "names rank 2");
    CHECK_CONTAINS(refusal([] { make_plan(2, {2}, "r", {0}); }), "1 entries");
}

TEST("hosts in any order become the same plan, with ranks of a host side by side") {
    const Plan plan = plan_of_groups({{7, 3, 7, 3, 5, 5, 9, 9}});
    CHECK_EQ(format_mode(plan), std::string("r:2x4"));
    CHECK((plan.ranks == std::vector<int>{1, 3, 4, 5, 0, 2, 6, 7}));
    for (int rank = 0; rank < 8; ++rank) {
        CHECK_EQ(plan.ranks[static_cast<size_t>(plan.positions[static_cast<size_t>(rank)])], rank);
    }
}

TEST("racks make a third dimension, with their hosts side by side") {
    const Plan plan = plan_of_groups({{0, 0, 1, 1, 2, 2, 3, 3}, {0, 0, 1, 1, 0, 0, 1, 1}});
    CHECK_EQ(format_mode(plan), std::string("r:2x2x2"));
    CHECK((plan.ranks == std::vector<int>{0, 1, 4, 5, 2, 3, 6, 7}));
}

TEST("uneven hosts fall back to one ring in host order, and the reason says so") {
    const Plan plan = plan_of_groups({{0, 1, 0, 1, 2}});
    CHECK_EQ(format_mode(plan), std::string("r:5"));
    CHECK((plan.ranks == std::vector<int>{0, 2, 1, 3, 4}));
    CHECK_CONTAINS(plan.reason, "hosts are uneven: they have 2, 2 and 1 ranks");
}

TEST("uneven racks leave their level out, and the reason says so") {
    const Plan plan = plan_of_groups({{0, 0, 1, 1, 2, 2}, {0, 0, 0, 0, 1, 1}});
    CHECK_EQ(format_mode(plan), std::string("r:2x3"));
    CHECK_CONTAINS(plan.reason, "racks are uneven: they have 2 and 1 hosts");
}

TEST("a host in two racks is refused") {
    CHECK_CONTAINS(refusal([] { plan_of_groups({{0, 0}, {0, 1}}); }), "lies in both");
}

TEST("options are parsed and formatted") {
    const Options options = parse_options("-mode bnrr:4x2x1x1 --dbg_level 1 -dev_sync 2");
    CHECK_EQ(options.modes, std::string("bnrr"));
    CHECK((options.dimensions == std::vector<int>{4, 2, 1, 1}));
    CHECK_EQ(options.dbg_level, 1);
    CHECK_EQ(format_options(options), std::string("-mode bnrr:4x2x1x1 -dev_sync 2 -dbg_level 1"));
    CHECK_EQ(options.shared_memory, 1);
    CHECK_EQ(format_options(parse_options("-shared_memory 0")), std::string("-mode p -shared_memory 0"));
    CHECK_EQ(parse_options("").modes, std::string("p"));
    CHECK_EQ(format_options(parse_options("-mode p:6x2x1x1")), std::string("-mode p:6x2x1x1"));
}

TEST("options of the original that do nothing here are named") {
    CHECK_EQ(idle_options(parse_options("-mode r:4 -dbg_level 1 -dump_iter 0")), std::string());
    CHECK_EQ(idle_options(parse_options("-rebind_iter 3")),
             std::string("DDL_OPTIONS: ignored, because only PowerAI's DDL used it: -rebind_iter 3"));
    CHECK_CONTAINS(idle_options(parse_options("-dev_sync 2 -dump_iter 5")), ": -dump_iter 5, -dev_sync 2");
}

TEST("wrong options are named with what is allowed") {
    CHECK_CONTAINS(refusal([] { parse_options("-mode q:2"); }), "unknown mode 'q'");
    CHECK_CONTAINS(refusal([] { parse_options("-mode c:2"); }), "RCS");
    CHECK_CONTAINS(refusal([] { parse_options("-mode r:4x"); }), "dimension of 'r:4x' is ''");
    CHECK_CONTAINS(refusal([] { parse_options("-mode r:0x4"); }), "is '0'");
    CHECK_CONTAINS(refusal([] { parse_options("-mode br:4x2x1"); }), "2 modes for 3 dimensions");
    CHECK_CONTAINS(refusal([] { parse_options("-mode"); }), "has no value");
    CHECK_CONTAINS(refusal([] { parse_options("-dbg_level 3"); }), "from 0 to 2");
    CHECK_CONTAINS(refusal([] { parse_options("-colour red"); }), "unknown option '-colour'");
    CHECK_CONTAINS(refusal([] { parse_options("mode r"); }), "begin with a dash");
}

TEST("the plan that options ask for has no dimension of size 1") {
    const Plan plan = plan_of_options(parse_options("-mode bnrr:4x2x1x1"), 8);
    CHECK_EQ(format_mode(plan), std::string("bn:4x2"));
    CHECK_EQ(format_mode(plan_of_options(parse_options("-mode r"), 6)), std::string("r:6"));
    CHECK_CONTAINS(refusal([] { plan_of_options(parse_options("-mode r:4x2x1x1"), 12); }), "4x2x1x1 multiply to 8");
}

TEST("another order of the ranks leaves the rest of a plan as it was") {
    Plan plan = make_plan(4, {2, 2}, "mr", {}, "because");
    plan.small_bytes = 512;
    plan.halved_above = {64};
    plan.chunks = 3;
    const Plan other = reordered(plan, {2, 3, 1, 0});
    CHECK(other.ranks == std::vector<int>({2, 3, 1, 0}));
    CHECK(other.positions == std::vector<int>({3, 2, 0, 1}));
    CHECK_EQ(format_mode(other), std::string("mr:2x2"));
    CHECK_EQ(other.small_bytes, uint64_t{512});
    CHECK(other.halved_above == plan.halved_above);
    CHECK_EQ(other.chunks, 3);
    CHECK_EQ(other.reason, std::string("because"));
    CHECK_CONTAINS(refusal([&] { reordered(plan, {0, 1, 2}); }), "has 3 entries, but there are 4 ranks");
    CHECK_CONTAINS(refusal([&] { reordered(plan, {0, 1, 2, 2}); }), "names rank 2 twice");
}

TEST("a part of the ranks has the world's order, and its groups where it fills them evenly") {
    const auto ranks_of = [](const Plan& plan) { return plan.ranks; };
    const Plan reordered = make_plan(4, {4}, "r", {3, 1, 2, 0});
    CHECK(ranks_of(plan_of_part(reordered, {0, 1, 2, 3})) == std::vector<int>({3, 1, 2, 0}));
    // Numbers in the part: its rank 0 is the world's 3, its rank 1 the world's 0, ...
    CHECK(ranks_of(plan_of_part(reordered, {3, 0, 2})) == std::vector<int>({0, 2, 1}));
    const Plan two_hosts = make_plan(8, {4, 2}, "r", {7, 5, 3, 1, 6, 4, 2, 0});
    const Plan half = plan_of_part(two_hosts, {0, 1, 2, 3});
    CHECK(half.dimensions == std::vector<int>({2, 2}));
    CHECK(half.ranks == std::vector<int>({3, 1, 2, 0}));
    for (int rank = 0; rank < 4; ++rank) {
        CHECK_EQ(half.ranks[static_cast<size_t>(half.positions[static_cast<size_t>(rank)])], rank);
    }
    const Plan one_a_host = plan_of_part(two_hosts, {0, 7});
    CHECK(one_a_host.dimensions == std::vector<int>({2}));
    CHECK(one_a_host.ranks == std::vector<int>({1, 0}));
    CHECK(plan_of_part(two_hosts, {0, 2, 7}).dimensions == std::vector<int>({3}));
    CHECK(plan_of_part(two_hosts, {5}).dimensions == std::vector<int>({1}));
    const Plan racks = make_plan(8, {2, 2, 2}, "r");
    CHECK(plan_of_part(racks, {0, 2, 4, 6}).dimensions == std::vector<int>({2, 2}));
    CHECK(plan_of_part(racks, {0, 4}).dimensions == std::vector<int>({2}));
}

TEST("dimensions whose product is beyond all numbers are refused without a wrong one") {
    const auto message = check::message_of<Error>([] { make_plan(8, {1 << 20, 1 << 20, 1 << 20}, "r"); });
    CHECK_CONTAINS(message, "multiply to more than 2147483647, but there are 8 ranks");
}
