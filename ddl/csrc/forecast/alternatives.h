// The plans that make sense on a described network, each with its forecast. Pure.
#pragma once

#include <string>
#include <vector>

#include "forecast/network.h"
#include "forecast/simulate.h"

namespace ddl {

struct Alternative {
    Plan plan;
    Algorithm algorithm = Algorithm::automatic;
    Forecast forecast;
};

// The best plan for an allreduce of `task` on `network`: among the plans of alternatives() within 5% of the shortest
// forecast, the one with the fewest rounds. `reason` says what it was compared with.
Plan choose_plan(const Network& network, const Task& task);

// The plans of an allreduce: each way of joining neighbouring tiers into dimensions, from one ring over all to a
// dimension for each; the chosen plan without chunks; and recursive doubling. First the library's choice, then the
// others by time. Plans whose simulation would take minutes are left out: rings over more ranks than the buffer has
// elements. If the library would choose such a plan, recursive doubling stands first, and its reason says so.
std::vector<Alternative> alternatives(const Network& network, const Task& task);

}  // namespace ddl
