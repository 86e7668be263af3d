// Times a schedule on a described network, without running it. Pure: no clock, no transport.
//
// Events are the ends of messages. A message travels when both its ends have posted it. Messages from one rank to
// another travel one after the other, as on a connection. Messages that share a link share its bandwidth max-min
// fairly. The latency comes after the last byte. Chunks start by the engine's rules.
#pragma once

#include "forecast/network.h"
#include "schedule/plan.h"
#include "schedule/schedule.h"

namespace ddl {

struct Forecast {
    double seconds = 0;
    std::vector<double>
        tier_bytes;  // bytes that a rank sends in messages that turn around at each tier: the mean over ranks
    std::vector<double> tier_messages;  // the number of these messages
    uint32_t chunks = 0;                // of rank 0
    uint32_t rounds = 0;                // of the longest chunk of any rank: how many messages follow one another
    bool symmetric = false;             // one rank stood for all
    std::string algorithm;
    std::string reason;  // for the algorithm
};

// A dimension that MPI or NCCL reduces is timed as our ring would be.
//
// Throws Error(DDL_ERROR_ARGUMENT) if plan and network have different sizes.
//
// If no child of the network is odd, ranks stand in order, and each dimension of the plan is one tier of the network or
// several neighbours, an allreduce is the same for every rank, and one rank is simulated. This takes milliseconds for
// any number of ranks. In a dimension of several tiers it is the rank whose neighbour is farthest away, because a ring
// is as fast as its slowest link.
//
// Otherwise all ranks are simulated while their messages are few. Above two million messages, a ring through the tree
// in order is timed by its recurrence (ring_time.h). For other hierarchies one rank of each class of like ranks is
// simulated (classes.h), if there are such classes. `window`: chunks in flight, as EngineOptions::window.
//
// Parts of a buffer differ by an element if it does not divide evenly. Then a rank that is simulated for others sends
// the largest part in every round: with one chunk in a ring of equal links this is the time of all, because that part
// goes round; else it may be an element more. Apart from this, the last two give the result of simulating all ranks.
Forecast simulate(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning = {},
                  int window = 16, bool use_symmetry = true);

// True if simulate() takes a few seconds at most. Throws as simulate() does.
bool is_quick(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning = {});

}  // namespace ddl
