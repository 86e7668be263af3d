// Where the ranks of a job are, and what follows from it. Pure.
#pragma once

#include <string>
#include <vector>

#include "schedule/options.h"
#include "schedule/plan.h"

namespace ddl {

struct Placement {
    std::vector<int> host_of;  // number of each rank's host, in the order in which ranks name them
    int num_hosts = 0;

    // Of a rank among those of its host, in the order of their numbers; and how many they are.
    int local_rank(int rank) const;
    int local_size(int rank) const;
    // Ranks by host, then by number: what stands next to one another in the innermost dimension shares a host.
    std::vector<int> host_order() const;
};

Placement place(const std::vector<std::string>& hosts);

// The world's plan. Dimensions that `options` name are taken, over the ranks in host order; otherwise they are ranks a
// host x hosts. Throws Error(DDL_ERROR_ARGUMENT) where they do not multiply to the number of ranks.
Plan plan_of(const Options& options, const Placement& placement);

}  // namespace ddl
