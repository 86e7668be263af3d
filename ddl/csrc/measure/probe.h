// Measures the links between the hosts of a job, over the transport that it will use.
//
// One rank a host, its leader, exchanges data with one leader at a time, both ways, in rounds of pairs that are in
// flight together (tiers.h says which, and why). A round lasts a fixed time, whatever the links carry; before each the
// leaders meet in a barrier, so that what one round saw is of that round's pairs only. The hosts' inner bandwidth is
// measured first, by pairs of ranks within each. The other ranks wait.
#pragma once

#include "forecast/tiers.h"
#include "measure/rounds.h"
#include "measure/stream.h"
#include "schedule/placement.h"
#include "transport/bootstrap.h"

namespace ddl {

struct ProbeOptions {
    Box between;                                        // a round's
    Box inside{0.005, 0.015, 0.002, size_t{16} << 20};  // within a host
};

struct Probe {
    Measurement between;         // hosts by the numbers of the placement
    double local_bandwidth = 0;  // bytes per second from one rank of a host to another, while others do so as well: the
                                 // median over hosts; 0 where no host has two ranks
    double local_latency = 0;    // seconds; 0 likewise
    double seconds = 0;          // that it took
};

// Collective over all ranks of the bootstrap; for at least two hosts. Rank 0 has the result, others a part of it.
// Uses tags from `tag` to tag + kProbeTags - 1. Throws Error, as Bootstrap::await() does.
constexpr Tag kProbeTags = 16;
Probe probe(Bootstrap& bootstrap, const Placement& placement, Tag tag, const ProbeOptions& options = {});

// For how long a rank may have to wait for the others' measurements where nothing is wrong: seconds.
double longest_probe(const Placement& placement, const ProbeOptions& options = {});

}  // namespace ddl
