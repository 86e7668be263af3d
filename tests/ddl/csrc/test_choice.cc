#include <ctime>

#include "base/status.h"
#include "check.h"
#include "forecast/choice.h"
#include "forecast/simulate.h"
#include "transport/host_memory.h"

using namespace ddl;

namespace {

constexpr double kLink = 25e6, kLocal = 2e9;  // bytes per second

Links links(Racks racks, std::vector<double> uplinks) {
    return {{std::move(racks), kLink, std::move(uplinks), 1e-4, 1e-4, ""}, kLocal, 5e-6};
}

// `each` ranks on each of `hosts` hosts, dealt in turn: 0 1 2 0 1 2.
Placement dealt(int hosts, int each) {
    std::vector<std::string> names;
    for (int i = 0; i < hosts * each; ++i) names.push_back("h" + std::to_string(i % hosts));
    return place(names);
}

Plan chosen(const std::string& options, const Placement& placement, const Links& found) {
    return choose(parse_options(options), placement, found);
}

}  // namespace

TEST("links are measured for mode p and more than one host only") {
    CHECK(needs_links(parse_options(""), dealt(2, 1)));
    CHECK(needs_links(parse_options("-mode p:2x1"), dealt(2, 1)));
    CHECK(needs_links(parse_options("-mode rp:1x2"), dealt(2, 1)));
    CHECK(!needs_links(parse_options("-mode r:2x1"), dealt(2, 1)));
    CHECK(!needs_links(parse_options("-mode r"), dealt(2, 1)));
    CHECK(!needs_links(parse_options(""), dealt(1, 4)));
}

TEST("two racks with slow uplinks make three dimensions, over ranks in rack order") {
    const Plan plan = chosen("", dealt(4, 2), links({{0, 2}, {1, 3}}, {kLink / 2, kLink / 2}));
    CHECK_EQ(format_mode(plan), "r:2x2x2");
    CHECK(plan.ranks == std::vector<int>({0, 4, 2, 6, 1, 5, 3, 7}));
    CHECK_CONTAINS(plan.reason, "2 racks: links 200 Mbit/s, uplinks 100 Mbit/s; 2x2x2 predicted ");
    CHECK_CONTAINS(plan.reason, "x faster than a flat ring");
}

TEST("one rack makes ranks a host by hosts") {
    const Plan plan = chosen("", dealt(4, 2), links({{0, 1, 2, 3}}, {}));
    CHECK_EQ(format_mode(plan), "r:2x4");
    CHECK_CONTAINS(plan.reason, "1 rack: links 200 Mbit/s; 2x4 predicted 1.2x faster than a flat ring");
}

TEST("one rank a host on one rack is one ring") {
    const Plan plan = chosen("", dealt(4, 1), links({{0, 1, 2, 3}}, {}));
    CHECK_EQ(format_mode(plan), "r:4");
    CHECK_CONTAINS(plan.reason, "1 rack: links 200 Mbit/s; one ring over all ranks, as no dimensions are");
}

TEST("one rank a host in racks is a dimension for each") {
    const Plan plan = chosen("", dealt(8, 1), links({{0, 2, 4, 6}, {1, 3, 5, 7}}, {kLink, kLink / 2}));
    CHECK_EQ(format_mode(plan), "r:4x2");
    CHECK(plan.ranks == std::vector<int>({0, 2, 4, 6, 1, 3, 5, 7}));
    CHECK_CONTAINS(plan.reason, "uplinks 100 Mbit/s to 200 Mbit/s");
}

TEST("the gain that is predicted is the simulation's, of every rank") {
    const Network network{{{2, 5e-6, kLocal}, {2, 1e-4, kLink}, {2, 1e-4, kLink / 2}}, 0};
    const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, kChoiceBytes / 4, 0};
    const double flat = simulate(network, make_plan(8, {8}, "r"), task, {}, 16, false).seconds;
    const double deep = simulate(network, make_plan(8, {2, 2, 2}, "r"), task, {}, 16, false).seconds;
    const Plan plan = chosen("", dealt(4, 2), links({{0, 2}, {1, 3}}, {kLink / 2, kLink / 2}));
    char text[40];
    std::snprintf(text, sizeof text, "predicted %.1fx faster", flat / deep);
    CHECK_CONTAINS(plan.reason, text);
}

TEST("uneven racks are ordered, and are no dimension") {
    const Plan plan = chosen("", dealt(5, 2), links({{0, 3, 4}, {1, 2}}, {kLink, kLink / 2}));
    CHECK_EQ(format_mode(plan), "r:2x5");
    CHECK(plan.ranks == std::vector<int>({0, 5, 3, 8, 4, 9, 1, 6, 2, 7}));
    CHECK_CONTAINS(plan.reason, "racks are uneven: they have 3 and 2 hosts; their level is left out");
    CHECK_CONTAINS(plan.reason, "predicted ");
}

TEST("uneven hosts are one ring in rack order") {
    const Plan plan = chosen("", place({"a", "b", "c", "a", "d"}), links({{0, 2}, {1, 3}}, {kLink / 2, kLink / 2}));
    CHECK_EQ(format_mode(plan), "r:5");
    CHECK(plan.ranks == std::vector<int>({0, 3, 2, 1, 4}));
    CHECK_CONTAINS(plan.reason, "hosts are uneven");
    CHECK_CONTAINS(plan.reason, "2 racks: links 200 Mbit/s");
}

TEST("dimensions that are asked for are laid over the ranks in rack order") {
    const Links found = links({{0, 2}, {1, 3}}, {kLink / 2, kLink / 2});
    const Plan plan = chosen("-mode p:2x2x2x1", dealt(4, 2), found);
    CHECK_EQ(format_mode(plan), "r:2x2x2");
    CHECK(plan.ranks == std::vector<int>({0, 4, 2, 6, 1, 5, 3, 7}));
    CHECK_CONTAINS(plan.reason, "2x2x2x1 as DDL_OPTIONS asks");
    CHECK_CONTAINS(check::message_of<Error>([&] { chosen("-mode p:3x2", dealt(4, 2), found); }),
                   "multiply to 6, but there are 8 ranks");
}

TEST("the faster the links, the longer are messages, as far as shared memory carries them") {
    const auto message_bytes = [](const std::string& options, int each, double link) {
        Links found = links({{0, 1, 2, 3}}, {});
        found.tiers.link = link;
        found.local_message = longest_riding(pipe_bytes_for(static_cast<size_t>(each)));
        const Plan plan = chosen(options, dealt(4, each), found);
        for (const uint64_t count : {75000, 5000000, 16 << 20}) {
            const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0};
            const uint64_t message =
                make_schedule(plan, 0, task).chunk_bytes / static_cast<uint64_t>(plan.dimensions[0]);
            CHECK(each == 1 || each > 32 || message <= found.local_message);
            CHECK(count < 1 << 20 || 2 * message >= plan.message_bytes);
        }
        return plan.message_bytes;
    };
    CHECK_EQ(message_bytes("", 1, 1e6), Tuning{}.message_bytes);
    CHECK_EQ(message_bytes("", 1, 25e6), uint64_t{50000});
    CHECK_EQ(message_bytes("-mode p:2x4", 2, 25e6), uint64_t{50000});
    CHECK_EQ(message_bytes("", 1, 12.5e9), uint64_t{256 << 10});
    CHECK_EQ(message_bytes("", 2, 12.5e9), uint64_t{128 << 10});
    CHECK_EQ(message_bytes("", 11, 12.5e9), uint64_t{128 << 10});
    CHECK_EQ(message_bytes("", 12, 12.5e9), longest_riding(pipe_bytes_for(12)));
    CHECK(longest_riding(pipe_bytes_for(12)) > Tuning{}.message_bytes);
    CHECK_EQ(message_bytes("", 33, 12.5e9), Tuning{}.message_bytes);  // their pipes carry less
    CHECK_EQ(message_bytes("-mode np:2x4", 2, 12.5e9), uint64_t{0});
}

TEST("a thousand hosts are decided on in seconds") {
    Racks racks(32);
    for (int host = 0; host < 1024; ++host) racks[static_cast<size_t>(host % 32)].push_back(host);
    const Placement placement = dealt(1024, 4);
    const double begin = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    const Plan plan = chosen("", placement, links(std::move(racks), std::vector<double>(32, kLink / 2)));
    CHECK(static_cast<double>(std::clock()) / CLOCKS_PER_SEC - begin < (check::kSanitized ? 60 : 10));
    CHECK_EQ(plan.dimensions[0], 4);
    CHECK_CONTAINS(plan.reason, "32 racks: links 200 Mbit/s, uplinks 100 Mbit/s; ");
}

TEST("the least time of an allreduce is that of the slowest cut through the measured links") {
    // 4 hosts behind links of kLink: each byte crosses 2 x 3/4 times.
    const double seconds = least_seconds_per_byte(dealt(4, 2), links({{0, 1, 2, 3}}, {}));
    CHECK(seconds > 1.5 / kLink * 0.999 && seconds < 1.5 / kLink * 1.001);
    CHECK(least_seconds_per_byte(place({"a", "a", "b"}), links({{0, 1}}, {})) == 0);  // not even
}
