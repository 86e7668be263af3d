// A described network, and lower bounds on the time of an allreduce on it. Pure.
//
// A network is a tree of switches. Tier 0 joins the ranks of a host, tier 1 the hosts of a rack, tier 2 the racks of an
// aisle, and so on. Each child has one full-duplex link to its switch, shared by everything that passes between the
// child and the rest. Messages inside a host use the two ranks' links of tier 0. Other messages use the links of tiers
// 1 and up, to the switch where their two ends meet, and down again. All children of a tier are alike, except those
// listed as odd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ddl {

struct Tier {
    int size = 1;            // children of a switch of this tier
    double latency = 0;      // seconds, for a message that turns around at this tier
    double bandwidth = 1e9;  // bytes per second and direction, of each child's link
};

// A child that differs from the others of its tier: a host with fewer ranks, a slow link.
struct Odd {
    int tier = 0;
    int child = 0;         // counted over the whole network: rank, host, rack, ...
    int size = 0;          // of its own switch; 0: as the others
    double bandwidth = 0;  // of its link; 0: as the others
};

struct Network {
    std::vector<Tier> tiers;        // innermost first; rank r sits at place r, host by host
    double reduce_bandwidth = 0;    // bytes per second that a rank reduces; 0: takes no time
    std::vector<Odd> odd = {};      // each child at most once
    int size() const;               // ranks
    int children(size_t t) const;   // of all switches of tier t together: ranks, hosts, racks, ...
    int stride(size_t tier) const;  // ranks below one child of a switch of `tier`, if none is odd in size
    bool is_even(size_t t) const;   // whether all switches of tier t have the same number of children
};

// The layout of a network: tables of the place of each rank.
class Layout {
  public:
    explicit Layout(const Network& network);

    int size() const { return static_cast<int>(child_of_[0].size()); }
    size_t tiers() const { return child_of_.size(); }
    int children(size_t tier) const { return static_cast<int>(bandwidth_[tier].size()); }
    // The child of `tier` that a rank is, or is below.
    int child(size_t tier, int rank) const { return child_of_[tier][static_cast<size_t>(rank)]; }
    // The ranks below a child: first, and one past the last.
    std::pair<int, int> ranks(size_t tier, int child) const;
    // The children of the switch of `tier` that is child `parent` of the tier above: first, and one past the last.
    std::pair<int, int> members(size_t tier, int parent) const;
    double bandwidth(size_t tier, int child) const { return bandwidth_[tier][static_cast<size_t>(child)]; }
    // The tier at which messages between two ranks turn around; 0 for equal ranks.
    size_t meet(int a, int b) const;

  private:
    std::vector<std::vector<int>> child_of_;      // by tier and rank
    std::vector<std::vector<int>> first_rank_;    // by tier and child, and one past the last
    std::vector<std::vector<double>> bandwidth_;  // by tier and child
};

// Throws Error(DDL_ERROR_ARGUMENT), which names the tier and the value, if a size is below 1, a bandwidth is not above
// 0, a latency is negative, there are more ranks than an int counts, or an odd child does not exist or is listed twice.
void check(const Network& network);

// One term of a bound: seconds of latency, and bytes through the link of one child.
struct Term {
    double latency = 0, bytes = 0;
    double capacity = 0;  // bytes per second of that link
    int tier = -1, child = -1;
    double seconds() const { return latency + (capacity > 0 ? bytes / capacity : 0); }
};

// The witness of a bound: it divides the ranks into groups, which are children of a tier, and one more of all other
// ranks, if there are any. To reduce, each element must leave every group but one, and the result takes as many
// messages again. So 2 (groups - 1) buffers leave the groups, over links that carry `capacity` out of all groups
// together.
struct Cut {
    int tier = -1, first = 0, count = 0;  // each of these children is a group
    int groups = 0;                       // `count`, and 1 more if there are other ranks
    double bytes = 0, capacity = 0;
    double seconds() const { return capacity > 0 ? bytes / capacity : 0; }
};

// Lower bounds on an allreduce of `bytes` bytes, in seconds. a and B are latency and bandwidth.
struct Bounds {
    double ring = 0;  // one well-ordered ring over all ranks: 2 (N-1) a + 2 (N-1)/N x S / B, by the slowest link
    double hierarchical = 0;  // one dimension a tier, one after the other: the sum of the terms; 0: tiers are uneven
    double pipelined = 0;     // the same with perfectly overlapping chunks: the largest of the terms
    double cut = 0;           // any algorithm: the largest of the cuts around all children of a tier, around one child,
                              // and around each child of one switch. If no child is odd, the first kind decides:
                              // 2 (G-1)/G x S / C, for G groups behind links of C.
    Term ring_term;
    std::vector<Term> tier_terms;  // one a tier
    Cut cut_witness;
};
Bounds allreduce_bounds(const Network& network, uint64_t bytes);

}  // namespace ddl
