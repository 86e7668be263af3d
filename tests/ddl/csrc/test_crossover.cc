#include <cmath>

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

double simulated(const Network& network, const Plan& plan, uint64_t bytes, Algorithm algorithm) {
    Tuning tuning;
    tuning.algorithm = algorithm;
    return simulate(network, plan, allreduce(bytes), tuning).seconds;
}

}  // namespace

TEST("recursive doubling takes what the simulation says") {
    for (const Network& network : {switched(), racked(), odd()}) {
        for (const uint64_t bytes : {1 << 10, 64 << 10}) {
            const double expected = simulated(network, flat_plan(network.size()), bytes, Algorithm::latency);
            // Ranks that are not folded begin earlier than the formula has it.
            const double tolerance = network.size() == 8 ? 0.02 : 0.5;
            CHECK(std::fabs(doubling_seconds(network, bytes) / expected - 1) < tolerance);
        }
    }
}

TEST("the crossover is where the dimensions become faster") {
    const Plan plan = make_plan(8, {2, 4}, "r");
    const uint64_t small = crossover(switched(), plan);
    CHECK(small >= 512 && small <= 4096);
    CHECK(doubling_seconds(switched(), small / 2) <=
          1.3 * simulated(switched(), plan, small / 2, Algorithm::bandwidth));
    CHECK(doubling_seconds(switched(), 4 * small) > simulated(switched(), plan, 4 * small, Algorithm::bandwidth));
    CHECK(crossover(switched(300e-6), plan) > small);  // rounds cost more
    CHECK(crossover(racked(), make_plan(8, {2, 2, 2}, "r")) <= small);
}

TEST("long messages never go by recursive doubling, however long a round takes") {
    const Plan plan = make_plan(8, {2, 4}, "r");
    CHECK_EQ(crossover(switched(1), plan), kMostDoubled);
    CHECK_EQ(crossover({{{2, 30e-6, kFast}}}, flat_plan(2)), kMostDoubled);
}

TEST("without latencies or other ranks there is no crossover") {
    CHECK_EQ(crossover(switched(0), make_plan(8, {2, 4}, "r")), 0u);
    CHECK_EQ(crossover({{{1, 1e-6, 1e9}}}, flat_plan(1)), 0u);
}

TEST("a plan's own limit decides which allreduces go by recursive doubling, and those alone") {
    Plan plan = make_plan(8, {2, 4}, "r");
    plan.small_bytes = 1024;
    CHECK_EQ(make_schedule(plan, 0, allreduce(1024)).algorithm, "recursive doubling");
    CHECK_EQ(make_schedule(plan, 0, allreduce(1028)).algorithm, "hierarchy 2x4");
    const Task broadcast{Collective::broadcast, DDL_FLOAT32, DDL_SUM, 1024, 0};
    CHECK_EQ(make_schedule(plan, 0, broadcast).algorithm,
             make_schedule(make_plan(8, {2, 4}, "r"), 0, broadcast).algorithm);
}
