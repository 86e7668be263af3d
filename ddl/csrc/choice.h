// The world's plan from what was measured. Pure.
#pragma once

#include "network.h"
#include "placement.h"
#include "tiers.h"

namespace ddl {

// What mode p measured.
struct Links {
    Tiers tiers;
    double local_bandwidth = 0;  // bytes per second between ranks of a host; 0: not known
    double local_latency = 0;    // seconds
};

// Whether the plan depends on measured links: mode p, for a dimension at least, on more than one host.
bool needs_links(const Options& options, const Placement& placement);

// The plan, with ranks in the order of racks, hosts and their numbers. Dimensions that `options` name are laid over
// that order; otherwise they are choose_plan()'s on the measured network (ranks a host, hosts a rack, racks) for a
// buffer of kChoiceBytes. Racks of different sizes are no tier, and hosts of different sizes make one ring; `reason`
// says so, and what was measured. Throws Error as plan_of() does.
constexpr uint64_t kChoiceBytes = 64 << 20;
Plan choose(const Options& options, const Placement& placement, const Links& links);

// What a plan is on the wire, from the rank that decides to the others.
std::vector<std::byte> pack(const Plan& plan);
// Throws Error(DDL_ERROR_INTERNAL) where `data` is no plan.
Plan unpack(const std::vector<std::byte>& data);

}  // namespace ddl
