// Plans from what was measured. Pure.
#pragma once

#include "forecast/network.h"
#include "forecast/tiers.h"
#include "schedule/placement.h"

namespace ddl {

// What mode p measured.
struct Links {
    Tiers tiers;
    double local_bandwidth = 0;  // bytes per second between ranks of a host; 0: not known
    double local_latency = 0;    // seconds
};

// Whether the plan depends on measured links: mode p, for a dimension at least, on more than one host.
bool needs_links(const Options& options, const Placement& placement);

// The plan of a job, laid_over() what was measured. Dimensions that `options` name are taken; otherwise they are
// choose_plan()'s on the measured network (ranks a host, hosts a rack, racks) for a buffer of kChoiceBytes. Racks of
// different sizes are no tier, and hosts of different sizes make one ring; `reason` says so. Throws Error as plan_of()
// does.
constexpr uint64_t kChoiceBytes = 64 << 20;
Plan choose(const Options& options, const Placement& placement, const Links& links);

// `plan`, whose positions are places in the measured network, over ranks in the order of racks, hosts and their
// numbers, with small_bytes, where it has none and hosts are even, by what was measured; `reason` begins with what that
// was.
Plan laid_over(Plan plan, const Placement& placement, const Links& links);

}  // namespace ddl
