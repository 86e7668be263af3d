#include <algorithm>

#include "check.h"
#include "forecast/crossover.h"
#include "forecast/simulate.h"

using namespace ddl;

namespace {

constexpr double kFast = 25e6, kSlow = 12.5e6;  // 200 and 100 Mbit/s

Network switched(double latency = 30e-6) { return {{{2, 1e-6, 5e9}, {4, latency, kFast}}}; }
Network racked() { return {{{2, 1e-6, 5e9}, {2, 30e-6, kFast}, {2, 40e-6, kSlow}}}; }
Network odd() { return {{{3, 1e-6, 5e9}, {2, 30e-6, kFast}}}; }

Task allreduce(uint64_t bytes) { return {Collective::allreduce, DDL_FLOAT32, DDL_SUM, bytes / 4, 0}; }

// By the dimensions of the plan.
double rings(const Network& network, const Plan& plan, uint64_t bytes) {
    return simulate(network, plan, allreduce(bytes), Tuning{Algorithm::bandwidth}).seconds;
}

// By recursive doubling after so many halvings.
double doubling(const Network& network, uint64_t bytes, int halvings) {
    Plan plan = flat_plan(network.size());
    plan.small_bytes = bytes;
    plan.halved_above.assign(static_cast<size_t>(halvings), 0);
    return simulate(network, plan, allreduce(bytes)).seconds;
}

Plan crossed(const Network& network, Plan plan) {
    set_crossover(plan, network);
    return plan;
}

}  // namespace

TEST("the crossover is where the dimensions become faster") {
    const Plan plan = flat_plan(6);  // four ranks, and two that are folded into others with all their bytes
    const auto six = [](double latency) { return Network{{{1, 1e-6, 5e9}, {6, latency, kFast}}}; };
    const Network network = six(100e-6);
    const uint64_t small = crossed(network, plan).small_bytes;
    CHECK(small > kLeastDoubled && small < kMostDoubled);
    CHECK(doubling(network, small / 2, 0) < rings(network, plan, small / 2));
    for (int halvings = 0; halvings <= 2; ++halvings) {
        CHECK(doubling(network, 2 * small, halvings) > rings(network, plan, 2 * small));
    }
    CHECK(crossed(six(300e-6), plan).small_bytes > small);  // rounds cost more
    CHECK(crossed(six(30e-6), plan).small_bytes < small);
}

TEST("the more bytes, the more halvings, and each is the best number of them within a tenth") {
    for (const Network& network : {switched(), racked(), odd()}) {
        const Plan plan = crossed(network, flat_plan(network.size()));
        CHECK(network.size() != 8 || !plan.halved_above.empty());
        CHECK(std::is_sorted(plan.halved_above.begin(), plan.halved_above.end()));
        constexpr uint64_t kFramed = 125;
        for (uint64_t bytes = 512; bytes <= plan.small_bytes; bytes *= 2) {
            const auto above = [&](uint64_t limit) { return bytes > limit; };
            const auto chosen = std::count_if(plan.halved_above.begin(), plan.halved_above.end(), above);
            const double took = doubling(network, bytes, static_cast<int>(chosen));
            const int most = network.size() == 8 ? 3 : 2;
            for (int other = 0; other <= most; ++other)
                CHECK(took <= 1.1 * doubling(network, bytes + 8 * kFramed, other));
        }
    }
}

TEST("long messages never go by recursive doubling, however long a round takes") {
    const Plan slow = crossed(switched(1), make_plan(8, {2, 4}, "r"));
    CHECK_EQ(slow.small_bytes, kMostDoubled);
    CHECK(slow.halved_above.empty());  // one would save a millisecond of two seconds
    const Plan pair = crossed({{{2, 30e-6, kFast}}}, flat_plan(2));
    CHECK_EQ(pair.small_bytes, kMostDoubled);
}

TEST("without latencies or other ranks there is no crossover") {
    CHECK_EQ(crossed(switched(0), make_plan(8, {2, 4}, "r")).small_bytes, 0u);
    CHECK_EQ(crossed({{{1, 1e-6, 1e9}}}, flat_plan(1)).small_bytes, 0u);
}

TEST("a plan's own limits decide which allreduces go by recursive doubling, and which are halved before") {
    Plan plan = make_plan(8, {2, 4}, "r");
    plan.small_bytes = 1024;
    plan.halved_above = {256, 512};
    const auto rounds = [&](uint64_t bytes) { return make_schedule(plan, 0, allreduce(bytes)).rounds.size(); };
    CHECK_EQ(make_schedule(plan, 0, allreduce(256)).algorithm, "recursive doubling");
    CHECK_EQ(make_schedule(plan, 0, allreduce(1024)).algorithm, "recursive halving and doubling");
    CHECK_EQ(make_schedule(plan, 0, allreduce(1028)).algorithm, "hierarchy 2x4");
    CHECK_EQ(rounds(256), size_t{3});
    CHECK_EQ(rounds(260), size_t{4});
    CHECK_EQ(rounds(516), size_t{5});
    const Task broadcast{Collective::broadcast, DDL_FLOAT32, DDL_SUM, 1024, 0};
    CHECK_EQ(make_schedule(plan, 0, broadcast).algorithm,
             make_schedule(make_plan(8, {2, 4}, "r"), 0, broadcast).algorithm);
}
