// The crossover: the size up to which recursive doubling, after some halvings, is the faster allreduce. Pure.
#pragma once

#include <cstdint>

#include "forecast/network.h"
#include "schedule/plan.h"
#include "schedule/schedule.h"

namespace ddl {

// Sets the plan's small_bytes, the most bytes (a power of two) for which recursive doubling is not slower than its
// dimensions, and how often these are halved first: the fewest halvings within a tenth of the fastest. At least
// kLeastDoubled, because below that the processors' cost of a round decides, and it was not measured. At most
// kMostDoubled, because longer messages in one piece each way take up to 1.7 times as long as simulated. 0 if it cannot
// be computed: latencies are not known, there is only one rank, or the simulation would take minutes.
constexpr uint64_t kLeastDoubled = 2 << 10;
constexpr uint64_t kMostDoubled = 16 << 10;
void set_crossover(Plan& plan, const Network& network);

}  // namespace ddl
