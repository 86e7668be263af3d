#include <chrono>
#include <cmath>

#include "base/status.h"
#include "check.h"
#include "forecast/simulate.h"

using namespace ddl;

namespace {

// 2 racks of 2 hosts of 2 ranks: links of 200 Mbit/s, uplinks of 100.
Network two_racks() { return {{{2, 5e-6, 2e9}, {2, 1e-4, 25e6}, {2, 1e-4, 12.5e6}}, 0}; }

Task allreduce(uint64_t count) { return {Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0}; }

double relative(double a, double b) { return std::fabs(a - b) / b; }

}  // namespace

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
    const auto begin = std::chrono::steady_clock::now();
    const Forecast forecast = simulate(network, make_plan(1024, {8, 16, 8}, "r"), allreduce(25'600'000));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    CHECK(took.count() < 10);
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
