#include <algorithm>
#include <random>
#include <set>

#include "check.h"
#include "forecast/part.h"

using namespace ddl;

namespace {

constexpr double kLink = 25e6, kLocal = 2e9;  // bytes per second

Links links(Racks racks, std::vector<double> uplinks) {
    return {{std::move(racks), kLink, std::move(uplinks), 1e-4, 2e-4, ""}, kLocal, 5e-6};
}

// `each` ranks on each of `hosts` hosts, dealt in turn: 0 1 2 0 1 2.
Placement dealt(int hosts, int each) {
    std::vector<std::string> names;
    for (int i = 0; i < hosts * each; ++i) names.push_back("h" + std::to_string(i % hosts));
    return place(names);
}

// 4 hosts of 2 ranks, the even ones in one rack, the odd ones in the other.
Basis two_racks(const std::string& options = "") {
    return {parse_options(options), dealt(4, 2), links({{0, 2}, {1, 3}}, {kLink / 2, kLink / 2})};
}

Plan world_of(const Basis& basis) { return choose(basis.options, basis.placement, *basis.links); }

Plan part_of(const Basis& basis, const std::vector<int>& members) {
    return plan_of_part(basis, world_of(basis), members);
}

// The members in the plan's order, by the world's numbers.
std::vector<int> in_order(const Plan& plan, const std::vector<int>& members) {
    std::vector<int> order;
    for (const int rank : plan.ranks) order.push_back(members[static_cast<size_t>(rank)]);
    return order;
}

}  // namespace

TEST("a communicator of all ranks has the dimensions, the order and the crossover of the world, whatever its numbers") {
    const std::vector<std::vector<int>> orders{
        {0, 1, 2, 3, 4, 5, 6, 7}, {7, 6, 5, 4, 3, 2, 1, 0}, {3, 1, 7, 5, 0, 2, 4, 6}};
    for (const char* options : {"", "-mode p:2x2x2", "-mode p:4x2", "-mode p:8"}) {
        const Basis basis = two_racks(options);
        const Plan world = world_of(basis);
        CHECK(world.small_bytes >= 2048);
        for (const auto& members : orders) {
            const Plan plan = plan_of_part(basis, world, members);
            CHECK_EQ(format_mode(plan), format_mode(world));
            CHECK_EQ(plan.small_bytes, world.small_bytes);
            CHECK(plan.halved_above == world.halved_above);
            CHECK(in_order(plan, members) == world.ranks);
            CHECK_EQ(plan.reason, "all ranks: " + world.reason);
        }
    }
}

TEST("one rank of each host has the racks as dimensions") {
    const Plan plan = part_of(two_racks(), {0, 1, 2, 3});
    CHECK_EQ(format_mode(plan), std::string("r:2x2"));
    CHECK(plan.ranks == std::vector<int>({0, 2, 1, 3}));
    CHECK_CONTAINS(plan.reason, "2 racks: links 200 Mbit/s, uplinks 100 Mbit/s; 2x2 predicted ");
    CHECK_CONTAINS(plan.reason, " bytes by recursive doubling");
}

TEST("one rank of each rack is one ring at the speed of the uplinks") {
    const Plan plan = part_of(two_racks(), {0, 1});
    CHECK_EQ(format_mode(plan), std::string("r:2"));
    CHECK_CONTAINS(plan.reason, "2 racks: links 200 Mbit/s, uplinks 100 Mbit/s; one ring");
}

TEST("the ranks of a rack know nothing of uplinks") {
    const std::vector<int> members{6, 0, 4, 2};
    const Plan plan = part_of(two_racks(), members);
    CHECK_EQ(format_mode(plan), std::string("r:2x2"));
    CHECK(in_order(plan, members) == std::vector<int>({0, 4, 6, 2}));
    CHECK_CONTAINS(plan.reason, "1 rack: links 200 Mbit/s; 2x2 predicted ");
    CHECK(plan.small_bytes >= 2048);
}

TEST("ranks of one host have its ring, and no crossover that was measured between hosts") {
    const Plan plan = part_of(two_racks(), {0, 4});
    CHECK_EQ(format_mode(plan), std::string("r:2"));
    CHECK_EQ(plan.small_bytes, uint64_t{0});
    CHECK_CONTAINS(plan.reason, "ranks of one host");
    CHECK_EQ(part_of(two_racks(), {5}).size(), 1);
}

TEST("a part that does not fill hosts or racks evenly says what it falls back to") {
    const std::vector<int> members{0, 1, 4};
    const Plan hosts = part_of(two_racks(), members);
    CHECK_EQ(format_mode(hosts), std::string("r:3"));
    CHECK(in_order(hosts, members) == std::vector<int>({0, 4, 1}));
    CHECK_CONTAINS(hosts.reason, "hosts are uneven: they have 2 and 1 ranks; one ring over all ranks, in host order");
    const Plan racks = part_of(two_racks(), {1, 0, 2});
    CHECK_EQ(format_mode(racks), std::string("r:3"));
    CHECK_CONTAINS(racks.reason, "racks are uneven: they have 2 and 1 hosts; their level is left out");
}

TEST("even hosts of an uneven world have dimensions of their own") {
    Basis basis{parse_options(""), place({"a", "a", "b", "b", "c"}), links({{0, 1, 2}}, {})};
    CHECK_EQ(format_mode(world_of(basis)), std::string("r:5"));
    const Plan plan = part_of(basis, {0, 1, 2, 3});
    CHECK_EQ(format_mode(plan), std::string("r:2x2"));
    CHECK(plan.small_bytes >= 2048);
}

TEST("dimensions that are asked for are kept as far as a part fills them") {
    const Plan plan = part_of(two_racks("-mode p:4x2"), {0, 1, 2, 3});
    CHECK_EQ(format_mode(plan), std::string("r:2x2"));
    CHECK(plan.ranks == std::vector<int>({0, 2, 1, 3}));
    CHECK(plan.small_bytes >= 2048);
    CHECK_CONTAINS(plan.reason, "2 racks: ");
    CHECK_CONTAINS(plan.reason, "the part that these ranks fill of the dimensions in DDL_OPTIONS");
    const Plan uneven = part_of(two_racks("-mode p:4x2"), {0, 4, 1});
    CHECK_EQ(format_mode(uneven), std::string("r:3"));
    CHECK_CONTAINS(uneven.reason, "uneven");
}

TEST("where links were not measured, a part follows the plan of all ranks and says so") {
    const Basis basis{parse_options("-mode mr:4x2"), dealt(2, 4), {}};
    const Plan world = plan_of(basis.options, basis.placement);
    const std::vector<int> half{0, 1, 2, 3};
    const Plan plan = plan_of_part(basis, world, half);
    CHECK_EQ(format_mode(plan), std::string("r:2x2"));
    CHECK(in_order(plan, half) == std::vector<int>({0, 2, 1, 3}));
    CHECK_CONTAINS(plan.reason, "links were not measured, so it follows the plan of all ranks: ");
}

// The law that the rest are cases of.
TEST("any part on several hosts has the plan of a job of its ranks") {
    std::mt19937_64 random(check::seed());
    for (int repeat = 0; repeat < (check::kSanitized ? 10 : 40); ++repeat) {
        const int hosts = 2 + static_cast<int>(random() % 7), each = 1 + static_cast<int>(random() % 3);
        const size_t racks = 1 + random() % static_cast<size_t>(std::min(hosts, 3));
        Racks members_of(racks);
        for (int host = 0; host < hosts; ++host) members_of[static_cast<size_t>(host) % racks].push_back(host);
        std::vector<double> uplinks;
        for (size_t i = 0; racks > 1 && i < racks; ++i) uplinks.push_back(kLink * (1 + static_cast<double>(i)) / 2);
        const Basis basis{parse_options(""), dealt(hosts, each), links(members_of, uplinks)};
        std::vector<int> members;
        std::vector<std::string> names;
        for (int rank = 0; rank < hosts * each; ++rank) {
            if (random() % 3 > 0) members.push_back(rank);
        }
        std::shuffle(members.begin(), members.end(), random);
        std::set<int> on, in;
        for (const int member : members) on.insert(member % hosts);
        if (on.size() < 2 || members.size() == static_cast<size_t>(hosts * each)) continue;
        // The job's hosts, numbered in the world's order; its racks by their first host.
        Placement placement;
        for (const int member : members) {
            placement.host_of.push_back(static_cast<int>(std::distance(on.begin(), on.find(member % hosts))));
        }
        placement.num_hosts = static_cast<int>(on.size());
        std::vector<std::pair<std::vector<int>, double>> found;
        for (size_t rack = 0; rack < racks; ++rack) {
            std::vector<int> its;
            int number = 0;
            for (const int host : on) {
                if (static_cast<size_t>(host) % racks == rack) its.push_back(number);
                ++number;
            }
            if (!its.empty()) found.emplace_back(its, racks > 1 ? uplinks[rack] : 0);
        }
        std::sort(found.begin(), found.end());
        Links job = links({}, {});
        for (const auto& [its, uplink] : found) {
            job.tiers.racks.push_back(its);
            if (found.size() > 1) job.tiers.uplinks.push_back(uplink);
        }
        if (found.size() == 1) job.tiers.far = 0;
        const Plan expected = choose(basis.options, placement, job), plan = part_of(basis, members);
        CHECK_EQ(format_mode(plan), format_mode(expected));
        CHECK(plan.ranks == expected.ranks);
        CHECK_EQ(plan.small_bytes, expected.small_bytes);
        CHECK(plan.halved_above == expected.halved_above);
        CHECK_EQ(plan.reason, expected.reason);
        // Ranks of a rack stand together, and in a rack ranks of a host.
        std::vector<std::pair<size_t, int>> blocks;
        for (const int member : in_order(plan, members)) {
            const std::pair<size_t, int> place{static_cast<size_t>(member % hosts) % racks, member % hosts};
            if (blocks.empty() || blocks.back() != place) blocks.push_back(place);
        }
        CHECK_EQ(blocks.size(), on.size());
        size_t changes = 1;
        for (size_t i = 1; i < blocks.size(); ++i) changes += blocks[i].first != blocks[i - 1].first;
        CHECK_EQ(changes, found.size());
    }
}
