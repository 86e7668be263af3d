// Plans of communicators that hold some of the world's ranks. Pure.
#pragma once

#include <optional>
#include <vector>

#include "forecast/choice.h"

namespace ddl {

// What the world's plan was made of.
struct Basis {
    Options options;
    Placement placement;
    std::optional<Links> links;  // where they were measured
};

// The plan of `members` of the world, by their numbers in the part. All ranks have the world's. Fewer, on several hosts
// between which links were measured, have the plan that choose() makes for a job of them, on what was measured of their
// hosts; but dimensions that DDL_OPTIONS names are kept where the part fills them evenly. Others have the world's
// dimensions as far as they fill them. Rings stand for modes other than r. `reason` says which of these it was.
Plan plan_of_part(const Basis& basis, const Plan& world, const std::vector<int>& members);

}  // namespace ddl
