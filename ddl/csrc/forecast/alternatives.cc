#include "forecast/alternatives.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "forecast/crossover.h"
#include "schedule/options.h"

namespace ddl {
namespace {

// A plan with fewer rounds is preferred to one that is a little faster: each round may have to wait for a late rank,
// which the simulation does not model.
constexpr double kNear = 1.05;

// All ways of joining neighbouring tiers into dimensions: first a dimension for each tier, last one ring. The first
// tier whose switches differ in size, and all tiers above it, are one dimension, as in plan_of_groups().
std::vector<std::vector<int>> joinings(const Network& network) {
    std::vector<int> sizes;
    int left = network.size();
    for (size_t i = 0; i < network.tiers.size() && network.is_even(i); ++i) {
        if (network.tiers[i].size > 1) sizes.push_back(network.tiers[i].size);
        left /= network.tiers[i].size;
    }
    if (left > 1) sizes.push_back(left);
    if (sizes.empty()) return {{1}};
    std::vector<std::vector<int>> found;
    for (unsigned joined = 0; joined < 1u << (sizes.size() - 1); ++joined) {
        std::vector<int> dimensions{sizes[0]};
        for (size_t i = 1; i < sizes.size(); ++i) {
            if (joined >> (i - 1) & 1) {
                dimensions.back() *= sizes[i];
            } else {
                dimensions.push_back(sizes[i]);
            }
        }
        found.push_back(std::move(dimensions));
    }
    return found;
}

Alternative forecast(const Network& network, Plan plan, const Task& task, Algorithm algorithm) {
    Forecast made = simulate(network, plan, task, Tuning{algorithm});
    return {std::move(plan), algorithm, std::move(made)};
}

bool faster(const Alternative& a, const Alternative& b) { return a.forecast.seconds < b.forecast.seconds; }

// The plans of all joinings, as rings, with their forecasts; none if the simulation would take minutes.
std::vector<Alternative> hierarchies(const Network& network, const Task& task) {
    check(network);
    std::vector<Alternative> found;
    for (const auto& dimensions : joinings(network)) {
        Plan plan = make_plan(network.size(), dimensions, "r");
        if (!is_quick(network, plan, task, Tuning{Algorithm::bandwidth})) continue;
        found.push_back(forecast(network, std::move(plan), task, Algorithm::bandwidth));
    }
    return found;
}

std::string name_of(const Plan& plan) {
    return plan.dimensions.size() == 1 ? "one ring over all ranks" : format_dimensions(plan.dimensions);
}

Plan fastest(const Network& network, const std::vector<Alternative>& found) {
    if (found.empty()) return make_plan(network.size(), joinings(network)[0], "r", {}, "a dimension for each tier");
    const double least = std::min_element(found.begin(), found.end(), faster)->forecast.seconds;
    const auto best = std::min_element(found.begin(), found.end(), [&](const Alternative& a, const Alternative& b) {
        const bool near_a = a.forecast.seconds <= kNear * least, near_b = b.forecast.seconds <= kNear * least;
        if (near_a != near_b) return near_a;
        return near_a && a.forecast.rounds != b.forecast.rounds ? a.forecast.rounds < b.forecast.rounds : faster(a, b);
    });
    const auto worst = std::max_element(found.begin(), found.end(), faster);
    Plan plan = best->plan;
    plan.reason = "the only one on this network";
    if (found.size() > 1) {
        char text[160];
        const char* why =
            best->forecast.seconds <= least ? "the fastest" : "the fewest rounds within 5% of the fastest";
        std::snprintf(text, sizeof text, "%s of %zu plans on this network; %s would take %.3g times as long", why,
                      found.size(), name_of(worst->plan).c_str(),
                      worst->forecast.seconds / std::max(best->forecast.seconds, 1e-12));
        plan.reason = text;
    }
    return plan;
}

}  // namespace

Plan choose_plan(const Network& network, const Task& task) {
    Plan plan = fastest(network, hierarchies(network, task));
    set_crossover(plan, network);
    return plan;
}

std::vector<Alternative> alternatives(const Network& network, const Task& task) {
    std::vector<Alternative> others = hierarchies(network, task);
    Plan plan = fastest(network, others);
    set_crossover(plan, network);
    const bool doubles = make_schedule(plan, 0, task).algorithm.rfind("recursive", 0) == 0;
    const bool replaced = others.empty() && !doubles;
    std::vector<Alternative> found{forecast(network, plan, task, replaced ? Algorithm::latency : Algorithm::automatic)};
    if (replaced) {
        found[0].forecast.reason = "not what the library does: rings over more ranks than elements are not simulated";
    }
    if (network.size() == 1) return found;
    if (!doubles && !replaced) {
        const auto chosen = std::find_if(others.begin(), others.end(), [&](const Alternative& other) {
            return other.plan.dimensions == plan.dimensions;
        });
        if (chosen != others.end()) others.erase(chosen);
        others.push_back(forecast(network, plan, task, Algorithm::latency));
    }
    if (found[0].forecast.chunks > 1) {
        Plan whole = plan;
        whole.chunks = 1;
        others.push_back(forecast(network, std::move(whole), task, Algorithm::bandwidth));
    }
    std::sort(others.begin(), others.end(), faster);
    std::move(others.begin(), others.end(), std::back_inserter(found));
    return found;
}

}  // namespace ddl
