// The planning half of the C interface: ddl_plan.h says what the functions mean.
#include <algorithm>
#include <iterator>
#include <numeric>

#include "api/boundary.h"
#include "ddl_plan.h"
#include "forecast/alternatives.h"
#include "schedule/options.h"

namespace ddl {
namespace {

Network network_of(const ddl_network* described) {
    need(described, "network");
    if (described->tier_count < 1 || described->tier_count > DDL_MOST_TIERS) {
        throw Error(DDL_ERROR_ARGUMENT, "a network of " + std::to_string(described->tier_count) +
                                            " tiers: expected 1 to " + std::to_string(DDL_MOST_TIERS));
    }
    need(described->tiers, "network->tiers");
    Network network;
    network.reduce_bandwidth = described->reduce_bandwidth;
    for (int i = 0; i < described->tier_count; ++i) {
        const ddl_tier& tier = described->tiers[i];
        network.tiers.push_back({tier.size, tier.latency, tier.bandwidth});
    }
    if (described->odd_count < 0) {
        throw Error(DDL_ERROR_ARGUMENT,
                    "network->odd_count is " + std::to_string(described->odd_count) + ", but must be 0 or more");
    }
    if (described->odd_count > 0) need(described->odd, "network->odd");
    for (int i = 0; i < described->odd_count; ++i) {
        const ddl_odd& odd = described->odd[i];
        network.odd.push_back({odd.tier, odd.child, odd.size, odd.bandwidth});
    }
    check(network);
    return network;
}

Task task_of(const Network& network, size_t count, ddl_type type) {
    const Task task{Collective::allreduce, type, DDL_SUM, count, 0};
    extent_of(task, network.size());  // checks it
    return task;
}

static_assert(static_cast<int>(StepKind::send) == DDL_STEP_SEND);
static_assert(static_cast<int>(StepKind::receive) == DDL_STEP_RECEIVE);
static_assert(static_cast<int>(StepKind::reduce) == DDL_STEP_REDUCE);
static_assert(static_cast<int>(StepKind::copy) == DDL_STEP_COPY);
static_assert(static_cast<int>(StepKind::divide) == DDL_STEP_DIVIDE);
static_assert(static_cast<int>(StepKind::reduce_scatter) == DDL_STEP_REDUCE_SCATTER);
static_assert(static_cast<int>(StepKind::allgather) == DDL_STEP_ALLGATHER);

int tier_of(const Step& step, const Schedule& schedule, const Layout& layout) {
    if (step.is_message()) return static_cast<int>(layout.meet(schedule.rank, step.peer));
    int tier = -1;
    if (!step.is_group()) return tier;
    for (const int member : schedule.groups[step.dimension]) {
        if (member != schedule.rank) tier = std::max(tier, static_cast<int>(layout.meet(schedule.rank, member)));
    }
    return tier;
}

Plan plan_of(const Network& network, const ddl_plan* asked, const Task& task) {
    const Options options = parse_options(asked && asked->mode ? std::string("-mode ") + asked->mode : "");
    Plan plan;
    if (options.dimensions.empty()) {
        plan = choose_plan(network, task);
        if (options.modes != "p") {
            plan.modes = make_plan(network.size(), plan.dimensions, options.modes).modes;  // one for each, checked
        }
    } else {
        Options measured = options;
        std::replace(measured.modes.begin(), measured.modes.end(), 'p', 'r');
        plan = plan_of_options(measured, network.size());
        plan.reason = "as asked for";
    }
    if (asked && asked->chunks < 0) {
        throw Error(DDL_ERROR_ARGUMENT, "chunks: " + std::to_string(asked->chunks) + "; expected 0 (by size) or more");
    }
    plan.chunks = asked ? asked->chunks : 0;
    return plan;
}

void copy_forecast(ddl_forecast& to, const Plan& plan, const Forecast& from) {
    to = {};
    to.seconds = from.seconds;
    std::copy(from.tier_bytes.begin(), from.tier_bytes.end(), to.tier_bytes);
    std::copy(from.tier_messages.begin(), from.tier_messages.end(), to.tier_messages);
    to.chunks = static_cast<int>(from.chunks);
    to.rounds = static_cast<int>(from.rounds);
    to.symmetric = from.symmetric;
    format_mode(plan).copy(to.plan, sizeof to.plan - 1);
    from.algorithm.copy(to.algorithm, sizeof to.algorithm - 1);
    from.reason.copy(to.reason, sizeof to.reason - 1);
}

}  // namespace
}  // namespace ddl

ddl_result ddl_plan_bounds(const ddl_network* network, uint64_t bytes, ddl_bounds* bounds) {
    return ddl::guarded([&]() -> ddl::Status {
        ddl::need(bounds, "bounds");
        const ddl::Bounds made = ddl::allreduce_bounds(ddl::network_of(network), bytes);
        const auto term = [](const ddl::Term& one) -> ddl_term {
            return {one.latency, one.bytes, one.capacity, one.tier, one.child};
        };
        const ddl::Cut& cut = made.cut_witness;
        *bounds = {};
        bounds->ring = made.ring;
        bounds->hierarchical = made.hierarchical;
        bounds->pipelined = made.pipelined;
        bounds->cut = made.cut;
        bounds->cut_witness = {cut.tier, cut.first, cut.count, cut.groups, cut.bytes, cut.capacity};
        bounds->ring_term = term(made.ring_term);
        std::fill(std::begin(bounds->tier_terms), std::end(bounds->tier_terms), term({}));
        std::transform(made.tier_terms.begin(), made.tier_terms.end(), bounds->tier_terms, term);
        return {};
    });
}

ddl_result ddl_plan_forecast(const ddl_network* network, const ddl_plan* plan, size_t count, ddl_type type,
                             ddl_forecast* forecast) {
    return ddl::guarded([&]() -> ddl::Status {
        ddl::need(forecast, "forecast");
        const ddl::Network described = ddl::network_of(network);
        const ddl::Task task = ddl::task_of(described, count, type);
        const ddl::Plan made = ddl::plan_of(described, plan, task);
        ddl::copy_forecast(*forecast, made, ddl::simulate(described, made, task));
        return {};
    });
}

ddl_result ddl_plan_alternatives(const ddl_network* network, size_t count, ddl_type type, ddl_forecast* forecasts,
                                 size_t capacity, size_t* found) {
    return ddl::guarded([&]() -> ddl::Status {
        ddl::need(found, "found");
        if (capacity > 0) ddl::need(forecasts, "forecasts");
        const ddl::Network described = ddl::network_of(network);
        const auto made = ddl::alternatives(described, ddl::task_of(described, count, type));
        for (size_t i = 0; i < std::min(capacity, made.size()); ++i) {
            ddl::copy_forecast(forecasts[i], made[i].plan, made[i].forecast);
        }
        *found = made.size();
        return {};
    });
}

ddl_result ddl_plan_schedule(const ddl_network* network, const ddl_plan* plan, size_t count, ddl_type type, int rank,
                             ddl_step* steps, size_t capacity, size_t* found) {
    return ddl::guarded([&]() -> ddl::Status {
        ddl::need(found, "found");
        if (capacity > 0) ddl::need(steps, "steps");
        const ddl::Network described = ddl::network_of(network);
        const ddl::Task task = ddl::task_of(described, count, type);
        const ddl::Plan made = ddl::plan_of(described, plan, task);
        const ddl::Schedule schedule = ddl::make_schedule(made, rank, task);
        const ddl::Layout layout(described);
        size_t at = 0;
        for (size_t chunk = 0; chunk < schedule.chunks.size(); ++chunk) {
            const ddl::Span rounds = schedule.chunks[chunk];
            for (uint32_t round = rounds.begin; round < rounds.end; ++round) {
                for (uint32_t i = schedule.rounds[round].begin; i < schedule.rounds[round].end; ++i, ++at) {
                    if (at >= capacity) continue;
                    const ddl::Step& step = schedule.steps[i];
                    const bool sends = step.kind == ddl::StepKind::send;
                    steps[at] = {static_cast<int>(chunk),
                                 static_cast<int>(round - rounds.begin),
                                 static_cast<ddl_step_kind>(step.kind),
                                 step.peer,
                                 ddl::tier_of(step, schedule, layout),
                                 sends ? step.from.offset : step.to.offset,
                                 step.bytes};
                }
            }
        }
        *found = at;
        return {};
    });
}
