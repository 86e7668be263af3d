// Which ranks are alike: one of them can be simulated for all. Pure.
#pragma once

#include <vector>

#include "forecast/network.h"
#include "forecast/traffic.h"
#include "schedule/plan.h"

namespace ddl {

// Each link is two, one in each direction. They are numbered by tier, then by child.
int link_of(const Layout& layout, size_t tier, int rank, bool up);
std::vector<double> link_capacities(const Layout& layout);

// The links from one rank to another.
std::vector<Use> way(const Layout& layout, int from, int to);

// The rank to which `rank` sends in the plan's ring of `dimension`.
int next_in_ring(const Plan& plan, int rank, size_t dimension);

struct Classes {
    std::vector<int> of;     // of each rank
    std::vector<int> first;  // rank of each class
    std::vector<int> count;  // ranks of each class
    // What a class's messages use in each dimension, at [class x dimensions + dimension], of links that stand for all
    // that are like them. Empty if each rank is a class.
    std::vector<std::vector<Use>> uses;
};

Classes each_alone(int size);

// The coarsest classes that see the same: whose neighbours in the plan's rings are of the same classes, over links of
// the same rates that ranks of the same classes share. In rings of equal parts such ranks do the same at the same time.
// Found by refinement (Cardon and Crochemore, 1982), by 64 bits of hash. Each rank alone if that would not halve
// them.
Classes alike(const Network& network, const Layout& layout, const Plan& plan);

}  // namespace ddl
