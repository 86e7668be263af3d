// A described network, and the least time that an allreduce can take on it. Pure.
//
// A network is a tree of switches. Tier 0 joins the ranks of a host, tier 1 the hosts of a rack, tier 2 the racks of an
// aisle, and so on. Each child of a switch has a link into it: full duplex, shared by all that passes between the child
// and the rest. Messages inside a host use the two ranks' links of tier 0; others use the links of the tiers from 1 up
// to the switch where their ends meet, and back down.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddl {

struct Tier {
    int size = 1;            // children of a switch of this tier
    double latency = 0;      // seconds, of a message that turns around at this tier
    double bandwidth = 1e9;  // bytes per second and direction, of each child's link
};

struct Network {
    std::vector<Tier> tiers;          // innermost first; rank r sits at place r, host by host
    double reduce_bandwidth = 0;      // bytes per second that a rank reduces; 0: takes no time
    int size() const;                 // ranks
    int stride(size_t tier) const;    // ranks below one child of a switch of `tier`
    size_t meet(int a, int b) const;  // the tier at which the ways of two ranks meet; 0 for equal ranks
};

// Throws Error(DDL_ERROR_ARGUMENT), which names the tier and the value, where a size is below 1, a bandwidth is not
// above 0, a latency is negative, or there are more ranks than an int counts.
void check(const Network& network);

// What an allreduce of `bytes` bytes takes at least, in seconds. a and B are latency and bandwidth.
struct Bounds {
    double ring = 0;          // well-ordered ring over all ranks: 2 (N-1) a + 2 (N-1)/N x S / B, by the slowest tier
    double hierarchical = 0;  // one dimension a tier, one after the other: the sum of the tiers' terms
    double pipelined = 0;     // its floor with chunks: the largest of the terms
    double cut = 0;           // any algorithm: max over tiers of 2 (G-1)/G x S / C, for G groups behind links of C.
                              // (For trees the cuts around single links decide: ForestColl, arXiv:2402.06787.)
};
Bounds allreduce_bounds(const Network& network, uint64_t bytes);

}  // namespace ddl
