// Times a schedule on a described network, without running it. Pure: no clock, no transport.
//
// Events are the ends of messages. A message travels when both its ends have posted it; from one rank to another one
// travels after the other, as on a connection; those that share a link share its bandwidth max-min fairly; the latency
// comes after the last byte. Chunks are started by the engine's rules.
#pragma once

#include "network.h"
#include "plan.h"
#include "schedule.h"

namespace ddl {

struct Forecast {
    double seconds = 0;
    uint64_t messages = 0;           // of the ranks that were simulated
    std::vector<double> tier_bytes;  // what a rank sends whose messages meet at each tier: the mean over ranks
    bool symmetric = false;          // one rank stood for all
    std::string algorithm;
};

// Throws Error(DDL_ERROR_ARGUMENT) where plan and network have different sizes.
//
// Where the plan's dimensions are the network's tiers and ranks stand in order, every rank of an allreduce sees the
// same, and one of them is simulated: that takes milliseconds for any size. Otherwise the cost grows with ranks x
// messages; hundreds of ranks take seconds. `window`: chunks in flight, as EngineOptions::window.
Forecast simulate(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning = {},
                  int window = 16, bool use_symmetry = true);

}  // namespace ddl
