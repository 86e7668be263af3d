// Measures the links between the hosts of a job, over the transport that the job will use.
//
// One rank of each host, its leader, exchanges data with one other leader at a time, both ways. In a round many pairs
// do so at once (rounds.h says which, and why). A round lasts a fixed time, however fast the links are. The leaders
// pass a barrier before each round, so that rounds do not overlap. First, pairs of ranks measure the bandwidth inside
// each host. All other ranks wait.
#pragma once

#include "forecast/tiers.h"
#include "measure/rounds.h"
#include "measure/stream.h"
#include "schedule/placement.h"
#include "transport/bootstrap.h"

namespace ddl {

struct ProbeOptions {
    Box between;                                        // of a round
    Box inside{0.005, 0.015, 0.002, size_t{16} << 20};  // within a host
};

struct Probe {
    Measurement between;         // hosts by the numbers of the placement
    double local_bandwidth = 0;  // bytes per second between two ranks of a host while others do the same: the median
                                 // over hosts; 0 if no host has two ranks
    double local_latency = 0;    // seconds; 0 likewise
    double seconds = 0;          // that measuring took
};

// Collective over all ranks of the bootstrap, for at least two hosts. Rank 0 gets the whole result, others a part of
// it. Uses tags from `tag` to tag + kProbeTags - 1. Throws Error, as Bootstrap::await() does.
constexpr Tag kProbeTags = 16;
Probe probe(Bootstrap& bootstrap, const Placement& placement, Tag tag, const ProbeOptions& options = {});

// The longest time, in seconds, that a rank waits for the others' measurements if nothing is wrong.
double longest_probe(const Placement& placement, const ProbeOptions& options);

}  // namespace ddl
