// Classes of ranks that are alike: one of a class can be simulated for all. Pure.
#pragma once

#include <vector>

#include "forecast/network.h"
#include "forecast/traffic.h"
#include "schedule/plan.h"

namespace ddl {

// A link counts as two, one in each direction, numbered by tier, then by child.
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
    // The links that a class's messages use in each dimension, at [class x dimensions + dimension]; a link stands for
    // all that are like it. Empty if each rank is a class.
    std::vector<std::vector<Use>> uses;
};

Classes each_alone(int size);

// The coarsest classes whose ranks see the same: their neighbours in the plan's rings are of the same classes, over
// links with the same rates, shared by ranks of the same classes. In rings of equal parts such ranks do the same at the
// same time. Found by partition refinement (Cardon and Crochemore, 1982) with hashes of 64 bits. If there are not at
// most half as many classes as ranks, each rank is a class.
Classes alike(const Network& network, const Layout& layout, const Plan& plan);

}  // namespace ddl
