// Plans of communicators that have some of the world's ranks. Pure.
#pragma once

#include <optional>
#include <vector>

#include "forecast/choice.h"

namespace ddl {

// The inputs of the world's plan.
struct Basis {
    Options options;
    Placement placement;
    std::optional<Links> links;  // if they were measured
};

// The plan of `members` of the world, by their numbers in the part. If these are all ranks, it is the world's plan. If
// they are on several hosts whose links were measured, it is the plan that choose() makes for a job of these ranks, on
// the measured links of their hosts; but dimensions from DDL_OPTIONS are kept if the part fills them evenly. Otherwise
// it has the world's dimensions, as far as the part fills them. Rings replace all modes but r. `reason` says which case
// it is.
Plan plan_of_part(const Basis& basis, const Plan& world, const std::vector<int>& members);

}  // namespace ddl
