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

// The plan that suits an allreduce of `task` on `network` best: of those that alternatives() tells of, the one with the
// fewest rounds among those whose forecasts are within 5% of the shortest. `reason` says what it was compared with.
Plan choose_plan(const Network& network, const Task& task, const Tuning& tuning = {});

// What an allreduce could do: each way of joining neighbouring tiers into dimensions, from one ring over all to a
// dimension for each; the chosen plan in one piece, without chunks; and recursive doubling. First what the library does
// by itself, then the others by time. Those whose simulation would take minutes are left out: rings over more ranks
// than the buffer has elements. Where the library would run these, recursive doubling stands first, and its reason says
// so.
std::vector<Alternative> alternatives(const Network& network, const Task& task, const Tuning& tuning = {});

}  // namespace ddl
