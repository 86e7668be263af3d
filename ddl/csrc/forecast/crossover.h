// Where recursive doubling stops being the faster allreduce on a network. Pure.
#pragma once

#include <cstdint>

#include "forecast/network.h"
#include "schedule/plan.h"
#include "schedule/schedule.h"

namespace ddl {

// Seconds of an allreduce of `bytes` by recursive doubling, where ranks stand in the network's order: in each round all
// ranks below a link send all bytes through it at once.
double doubling_seconds(const Network& network, uint64_t bytes);

// Up to how many bytes recursive doubling is not slower than `plan`'s dimensions, a power of two; at least
// kLeastDoubled, as below that rules what a round costs the processors, which nobody has measured; at most
// kMostDoubled, as longer messages in one piece each way take up to 1.7 times what the simulation says. 0 where it
// cannot be told: latencies are not known, there is but one rank, or there are so many whose dimensions are no tiers
// that their simulation would take minutes.
constexpr uint64_t kLeastDoubled = 2 << 10;
constexpr uint64_t kMostDoubled = 16 << 10;
uint64_t crossover(const Network& network, const Plan& plan, const Tuning& tuning = {});

}  // namespace ddl
