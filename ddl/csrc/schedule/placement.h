// Placement: the hosts of a job's ranks. Pure.
#pragma once

#include <string>
#include <vector>

#include "schedule/options.h"
#include "schedule/plan.h"

namespace ddl {

struct Placement {
    std::vector<int> host_of;  // the number of each rank's host; hosts are numbered by their first ranks
    int num_hosts = 0;

    // A rank's number among the ranks of its host, and the number of those.
    int local_rank(int rank) const;
    int local_size(int rank) const;
    // Ranks by host, then by number: neighbours in the innermost dimension share a host.
    std::vector<int> host_order() const;
};

Placement place(const std::vector<std::string>& hosts);

// The world's plan, over the ranks in host order. The dimensions are those of `options`, else ranks a host x hosts.
// Throws Error(DDL_ERROR_ARGUMENT) if they do not multiply to the number of ranks.
Plan plan_of(const Options& options, const Placement& placement);

}  // namespace ddl
