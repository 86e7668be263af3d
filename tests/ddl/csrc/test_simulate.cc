#include <array>
#include <cmath>
#include <ctime>
#include <random>

#include "base/status.h"
#include "check.h"
#include "forecast/classes.h"
#include "forecast/ring_time.h"
#include "forecast/simulate.h"

using namespace ddl;

namespace {

// 2 racks of 2 hosts of 2 ranks: links of 200 Mbit/s, uplinks of 100.
Network two_racks() { return {{{2, 5e-6, 2e9}, {2, 1e-4, 25e6}, {2, 1e-4, 12.5e6}}, 0}; }

Task allreduce(uint64_t count) { return {Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0}; }

double relative(double a, double b) { return std::fabs(a - b) / b; }

}  // namespace

TEST("the rounds are those of the rank that has most, not of one that is folded away") {
    const Forecast forecast = simulate({{{7, 0, 1e9}}, 0}, make_plan(7, {7}, "r"), allreduce(1));
    CHECK_EQ(forecast.algorithm, "recursive doubling with fold");
    CHECK_EQ(forecast.rounds, 4u);  // in, two among four ranks, and out; rank 0 is only in the first and in the last
    CHECK_EQ(simulate({{{1, 0, 1e9}}, 0}, make_plan(1, {1}, "r"), allreduce(1)).rounds, 0u);
}

TEST("a ring in one chunk takes the time of its formula") {
    const Network network{{{8, 1e-3, 1e6}}, 0};
    Tuning tuning;
    tuning.most_chunks = 1;
    const Forecast forecast = simulate(network, make_plan(8, {8}, "r"), allreduce(1 << 20), tuning);
    CHECK(relative(forecast.seconds, allreduce_bounds(network, 4 << 20).ring) < 1e-6);
    CHECK(forecast.symmetric);
}

TEST("dimensions in one chunk take the sum of their terms") {
    const Network network = two_racks();
    Plan plan = make_plan(8, {2, 2, 2}, "r");
    plan.chunks = 1;
    const Forecast forecast = simulate(network, plan, allreduce(1 << 24));
    CHECK(relative(forecast.seconds, allreduce_bounds(network, 1 << 26).hierarchical) < 1e-6);
}

TEST("chunks overlap the tiers, and no time is below the cut") {
    const Network network = two_racks();
    const Bounds bounds = allreduce_bounds(network, 1 << 26);
    CHECK(relative(bounds.cut, (1 << 26) / 12.5e6) < 1e-9);  // 2 racks: 2 (2-1)/2 x S / C
    double before = bounds.hierarchical * 1.01;
    for (const int chunks : {1, 4, 16, 32}) {
        Plan plan = make_plan(8, {2, 2, 2}, "r");
        plan.chunks = chunks;
        const double seconds = simulate(network, plan, allreduce(1 << 24)).seconds;
        CHECK(seconds <= before);
        CHECK(seconds >= bounds.cut);
        before = seconds;
        if (std::getenv("DDL_PRINT")) std::printf("chunks %d: %.3f s, cut %.3f\n", chunks, seconds, bounds.cut);
    }
    CHECK(before < 1.2 * bounds.cut);
}

TEST("one rank that stands for all gives the time of all") {
    const Network network = two_racks();
    for (const int chunks : {1, 5, 16}) {
        Plan plan = make_plan(8, {2, 2, 2}, "r");
        plan.chunks = chunks;
        const Forecast one = simulate(network, plan, allreduce(1 << 20));
        const Forecast all = simulate(network, plan, allreduce(1 << 20), {}, 16, false);
        CHECK(one.symmetric);
        CHECK(!all.symmetric);
        CHECK(relative(one.seconds, all.seconds) < 0.01);
    }
}

TEST("one rank stands for all where a dimension joins tiers") {
    const Network networks[] = {two_racks(),
                                {{{4, 1e-6, 1e9}, {2, 2e-5, 2e8}, {3, 5e-5, 1e8}}, 0},
                                {{{1, 1e-6, 1e9}, {4, 2e-5, 1e8}, {1, 0, 1e9}, {2, 5e-5, 2e8}}, 0}};
    for (const Network& network : networks) {
        for (const auto& joined : {std::vector<int>{0}, {0, 1}, {0, 2}, {0, 1, 2}}) {
            std::vector<int> dimensions;  // those of the tiers from each of `joined` up to the next
            for (size_t i = 0; i < joined.size(); ++i) {
                const auto from = static_cast<size_t>(joined[i]);
                const size_t to = i + 1 < joined.size() ? static_cast<size_t>(joined[i + 1]) : network.tiers.size();
                dimensions.push_back(network.stride(to) / network.stride(from));
            }
            for (const int chunks : {1, 4, 16}) {
                for (const uint64_t count : {1 << 12, 1 << 20}) {
                    Plan plan = make_plan(network.size(), dimensions, "r");
                    plan.chunks = chunks;
                    Tuning tuning;
                    tuning.algorithm = Algorithm::bandwidth;
                    const Forecast one = simulate(network, plan, allreduce(count), tuning);
                    const Forecast all = simulate(network, plan, allreduce(count), tuning, 16, false);
                    CHECK(one.symmetric && !all.symmetric);
                    // Without chunks to fill the gaps, ranks that are not at the slow link may hurry ahead in the next
                    // dimension; the one that stands for all is at it in each.
                    CHECK(one.seconds > 0.999 * all.seconds);
                    CHECK(one.seconds < (chunks > 1 && count > 1 << 12 ? 1.01 : 1.25) * all.seconds);
                    if (std::getenv("DDL_PRINT")) {
                        std::printf("%s, %d chunks of %llu: one %.6f s, all %.6f s\n", format_mode(plan).c_str(),
                                    chunks, static_cast<unsigned long long>(count), one.seconds, all.seconds);
                    }
                    for (size_t t = 0; t < network.tiers.size(); ++t) {
                        // Parts differ by an element.
                        CHECK(std::fabs(one.tier_bytes[t] - all.tier_bytes[t]) <= 4 * all.tier_messages[t]);
                        CHECK(std::fabs(one.tier_messages[t] - all.tier_messages[t]) < 1e-9);
                    }
                }
            }
        }
    }
}

TEST("no forecast is below the bound, however the elements divide") {
    std::mt19937_64 random(check::seed());
    const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    int symmetric = 0;
    for (int trial = 0; trial < 300; ++trial) {
        const Network network{{{pick(1, 6), 0, 1e5 * pick(1, 9)}, {pick(1, 4), 0, 1e5 * pick(1, 9)}}, 0};
        const int size = network.size();
        if (size == 1) continue;
        Plan plan = trial % 2 ? make_plan(size, {size}, "r")
                              : make_plan(size, {network.tiers[0].size, network.tiers[1].size}, "r");
        plan.chunks = pick(1, 3);
        Tuning tuning;
        tuning.algorithm = std::array{Algorithm::bandwidth, Algorithm::latency, Algorithm::automatic}[trial / 2 % 3];
        const auto task = allreduce(static_cast<uint64_t>(pick(1, pick(0, 1) ? 40 : 5000)));
        const double cut = allreduce_bounds(network, 4 * task.count).cut;
        const Forecast one = simulate(network, plan, task, tuning),
                       all = simulate(network, plan, task, tuning, 16, false);
        CHECK(one.seconds > 0.9999 * cut);
        CHECK(all.seconds > 0.9999 * cut);
        symmetric += one.symmetric;
        CHECK(one.seconds > 0.999 * all.seconds);
        // In one chunk over equal links it is the time of all: the largest part is sent in every round.
        const bool is_flat = network.tiers[0].size == 1 || network.tiers[1].size == 1;
        if (is_flat && one.chunks == 1) CHECK(relative(one.seconds, all.seconds) < 1e-3);
        for (size_t t = 0; t < network.tiers.size(); ++t) {
            CHECK(std::fabs(one.tier_bytes[t] - all.tier_bytes[t]) <= 4 * all.tier_messages[t] + 1e-6);
        }
    }
    CHECK(symmetric > 50);
}

TEST("many ranks are quick to simulate only where one stands for all") {
    const Network network{{{4, 1e-6, 1e9}, {32, 2e-5, 1e8}}, 0};
    const Task task = allreduce(1 << 20);
    CHECK(is_quick(network, make_plan(128, {4, 32}, "r"), task));
    CHECK(is_quick(network, make_plan(128, {4, 32}, "m"), task));
    CHECK(is_quick(network, flat_plan(128), task));
    CHECK(!is_quick(network, make_plan(128, {8, 16}, "r"), task));
    CHECK(!is_quick(network, make_plan(128, {4, 32}, "r"), allreduce(64)));  // by recursive doubling
    CHECK(is_quick(two_racks(), make_plan(8, {4, 2}, "r", {7, 6, 5, 4, 3, 2, 1, 0}), task));
    CHECK_CONTAINS(check::message_of<Error>([&] { is_quick(network, flat_plan(4), task); }), "128 ranks, the plan 4");
}

TEST("a badly ordered ring is slower than a well ordered one") {
    const Network network = two_racks();
    Plan good = make_plan(8, {8}, "r"), bad = make_plan(8, {8}, "r", {0, 4, 2, 6, 1, 5, 3, 7});
    const double well = simulate(network, good, allreduce(1 << 22)).seconds;
    const double badly = simulate(network, bad, allreduce(1 << 22)).seconds;
    CHECK(badly > 1.8 * well);
}

TEST("bytes of each tier are those of the formula") {
    const Forecast forecast = simulate(two_racks(), make_plan(8, {2, 2, 2}, "r"), allreduce(1 << 20));
    const double bytes = 4 << 20;
    CHECK(relative(forecast.tier_bytes[0], bytes) < 1e-6);
    CHECK(relative(forecast.tier_bytes[1], bytes / 2) < 1e-6);
    CHECK(relative(forecast.tier_bytes[2], bytes / 4) < 1e-6);
}

TEST("every collective comes to an end on the simulated network") {
    const Network network = two_racks();
    for (int c = 0; c <= static_cast<int>(Collective::barrier); ++c) {
        for (const uint64_t count : {0, 1, 1000, 1 << 18}) {
            const Task task{static_cast<Collective>(c), DDL_FLOAT32, DDL_SUM, count, 0};
            CHECK(simulate(network, make_plan(8, {2, 2, 2}, "r"), task).seconds >= 0);
        }
    }
}

TEST("1,024 ranks in 3 tiers take less than 10 seconds to simulate") {
    const Network network{{{8, 3e-6, 100e9}, {16, 5e-6, 12.5e9}, {8, 8e-6, 100e9}}, 0};
    const std::clock_t begin = std::clock();  // of the processor: others may use the machine
    const Forecast forecast = simulate(network, make_plan(1024, {8, 16, 8}, "r"), allreduce(25'600'000));
    CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 10);
    CHECK(forecast.seconds >= allreduce_bounds(network, 4 * 25'600'000).cut);
}

TEST("a rank reduces one message at a time, into however many chunks the buffer is cut") {
    const Network network{{{4, 0, 1e12}}, 1e9};
    const uint64_t bytes = 64 << 20;
    for (const int chunks : {1, 4, 16}) {
        for (const bool symmetric : {true, false}) {
            Plan plan = flat_plan(4);
            plan.chunks = chunks;
            const double seconds = simulate(network, plan, allreduce(bytes / 4), {}, 16, symmetric).seconds;
            CHECK(seconds >= 0.75 * static_cast<double>(bytes) / network.reduce_bandwidth);
            CHECK(seconds < 1.1 * static_cast<double>(bytes) / network.reduce_bandwidth);
        }
    }
}

TEST("what MPI or NCCL reduces is timed as its ring would be") {
    for (const uint64_t count : {uint64_t{100}, uint64_t{1} << 20}) {
        Tuning rings;
        rings.algorithm = Algorithm::bandwidth;
        const Forecast ring = simulate(two_racks(), make_plan(8, {2, 2, 2}, "r"), allreduce(count), rings);
        const Forecast mixed = simulate(two_racks(), make_plan(8, {2, 2, 2}, "mrm"), allreduce(count));
        CHECK_EQ(mixed.seconds, ring.seconds);
        CHECK(mixed.tier_bytes == ring.tier_bytes);
    }
}

TEST("a plan of another size than the network is refused") {
    CHECK_CONTAINS(check::message_of<Error>([] { simulate(two_racks(), flat_plan(4), allreduce(1)); }),
                   "the network has 8 ranks, the plan 4");
}

TEST("one ring in order takes by its recurrence what it takes event by event") {
    std::mt19937_64 random(check::seed());
    const auto pick = [&](double low, double high) {
        return std::uniform_real_distribution<double>(low, high)(random);
    };
    for (int trial = 0; trial < 30; ++trial) {
        Network network{{{3, 1e-6, pick(1e8, 1e10)}, {3, 1e-5, pick(1e8, 1e9)}, {2, 1e-4, pick(1e8, 1e9)}},
                        trial % 2 ? pick(1e9, 1e10) : 0};
        network.odd = {{1, 1, 5, 0}, {1, 2, 1, pick(1e7, 1e8)}, {2, 1, 2, pick(1e8, 1e9)}};
        const Layout layout(network);
        const uint64_t count = 1000 + static_cast<uint64_t>(pick(0, 200'000));
        Tuning tuning;
        tuning.algorithm = Algorithm::bandwidth;
        Plan plan = flat_plan(layout.size());
        plan.chunks = 1 + trial * 2;  // more than are in flight, too
        const Forecast all = simulate(network, plan, allreduce(count), tuning, 16, false);
        const auto ring = ring_time(network, layout, plan, count, 4, all.chunks, 16);
        CHECK(ring.has_value());
        if (!ring) continue;
        CHECK(relative(ring->seconds, all.seconds) < 1e-6);  // there, ends a thousandth of a byte apart are one
        for (size_t t = 0; t < 3; ++t) {
            CHECK(std::fabs(ring->tier_bytes[t] - all.tier_bytes[t]) < 1e-6 * (1 + all.tier_bytes[t]));
            CHECK(std::fabs(ring->tier_messages[t] - all.tier_messages[t]) < 1e-6);
        }
    }
    const Network network = two_racks();
    CHECK(!is_alone(network, Layout(network), make_plan(8, {8}, "r", {0, 4, 2, 6, 1, 5, 3, 7})));
    CHECK(!is_alone(network, Layout(network), make_plan(8, {4, 2}, "r")));
}

TEST("one rank of each class gives the time of all, on hosts of which one has a slow link") {
    // 16 ranks a host: 4 x 3 hosts, or 12 in a row. Few enough to simulate all, too.
    for (const Network& network :
         {Network{{{16, 1e-6, 5e9}, {12, 3e-5, 1.25e9}}, 0, {{1, 5, 0, 2.5e8}}},
          Network{{{16, 1e-6, 5e9}, {4, 3e-5, 1.25e9}, {3, 4e-5, 2e9}}, 2e9, {{2, 1, 0, 1e9}}},
          Network{{{16, 1e-6, 5e9}, {4, 3e-5, 1.25e9}, {3, 4e-5, 2e9}}, 0, {{1, 3, 0, 3e8}}}}) {
        std::vector<int> dimensions;
        for (const Tier& tier : network.tiers) dimensions.push_back(tier.size);
        Plan plan = make_plan(network.size(), dimensions, "r");
        const Classes classes = alike(network, Layout(network), plan);
        CHECK(classes.first.size() <= 12);
        CHECK(classes.first.size() > 1);
        plan.chunks = 200;  // more messages than are simulated for all
        const Task task = allreduce(200 * 192 * 64);
        const Forecast one = simulate(network, plan, task);
        const Forecast all = simulate(network, plan, task, {}, 16, false);
        CHECK(relative(one.seconds, all.seconds) < 1e-3);
        for (size_t t = 0; t < network.tiers.size(); ++t) {
            CHECK(relative(one.tier_bytes[t], all.tier_bytes[t]) < 1e-9);
            CHECK(relative(one.tier_messages[t], all.tier_messages[t]) < 1e-9);
        }
        if (std::getenv("DDL_PRINT"))
            std::printf("%zu classes: %.9f s, all %.9f s\n", classes.first.size(), one.seconds, all.seconds);
    }
}

TEST("ranks in uneven hosts, and ranks on a slow link, are told apart") {
    const Network even{{{2, 1e-6, 1e9}, {4, 1e-5, 1e8}}, 0};
    const auto classes = [](const Network& network, const Plan& plan) {
        return alike(network, Layout(network), plan).first.size();
    };
    CHECK_EQ(classes(even, make_plan(8, {2, 4}, "r")), size_t{1});
    Network slow = even;
    slow.odd = {{1, 2, 0, 5e7}};
    CHECK_EQ(classes(slow, make_plan(8, {2, 4}, "r")), size_t{4});  // by how far each host is behind the slow one
    CHECK_EQ(classes(slow, flat_plan(8)), size_t{8});
    Network uneven = even;
    uneven.odd = {{1, 0, 1, 0}, {1, 1, 3, 0}};
    CHECK_EQ(uneven.size(), 8);
    CHECK(classes(uneven, make_plan(8, {2, 4}, "r")) > 1);
}

TEST("a forecast of days, beside which a message takes less than a step of the clock, comes to an end") {
    const Network network{{{8, 1e-6, 5e9}, {4, 3e-5, 12500}, {2, 1e-4, 50000}}, 0};
    const Forecast forecast = simulate(network, make_plan(64, {8, 4, 2}, "r"), allreduce(1 << 24));
    CHECK(forecast.seconds >= 0.999 * allreduce_bounds(network, 1 << 26).cut);
    CHECK(forecast.seconds < 1.1 * allreduce_bounds(network, 1 << 26).cut);
}

TEST("a slow link slows down what passes it, and only that") {
    Network network{{{4, 0, 1e9}, {4, 0, 1e9}}, 0};
    Plan plan = make_plan(16, {4, 4}, "r");
    plan.chunks = 1;
    const double before = simulate(network, plan, allreduce(1 << 20)).seconds;
    network.odd = {{1, 3, 0, 1e8}};
    const double after = simulate(network, plan, allreduce(1 << 20)).seconds;
    // In the ring of hosts 1.5 quarters of the buffer pass each link four times: once for each rank of the host.
    CHECK(relative(after - before, 1.5 * (4 << 20) * (1 / 1e8 - 1 / 1e9)) < 1e-6);
}
