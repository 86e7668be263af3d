// Plans from measured links. Pure.
#pragma once

#include "forecast/network.h"
#include "forecast/tiers.h"
#include "schedule/placement.h"

namespace ddl {

// The links that mode p measured.
struct Links {
    Tiers tiers;
    double local_bandwidth = 0;  // bytes per second between ranks of a host; 0: not known
    double local_latency = 0;    // seconds
    uint64_t local_message = 0;  // longest message through the memory of the host with the most ranks; 0: there is none
};

// Whether the plan depends on measured links: some dimension has mode p, and there are several hosts.
bool needs_links(const Options& options, const Placement& placement);

// The plan of a job, laid_over() the measured links. The dimensions are those of `options`, else those that
// choose_plan() finds on the measured network (ranks a host, hosts a rack, racks) for a buffer of kChoiceBytes. Racks
// of different sizes make no tier, and hosts of different sizes make one ring; `reason` says so. Throws Error as
// plan_of() does.
constexpr uint64_t kChoiceBytes = 64 << 20;
Plan choose(const Options& options, const Placement& placement, const Links& links);

// The least seconds that any algorithm takes for each byte of an allreduce on the measured links, by their cuts; 0 if
// hosts have different numbers of ranks.
double least_seconds_per_byte(const Placement& placement, const Links& links);

// Puts ranks at the positions of `plan`, in the order of racks, hosts and numbers. Sets message_bytes, and small_bytes
// and halved_above if the plan has none and hosts are even, from the measured links. `reason` begins with what was
// measured.
Plan laid_over(Plan plan, const Placement& placement, const Links& links);

}  // namespace ddl
