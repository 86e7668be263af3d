#include "forecast/choice.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

#include "base/rank_list.h"
#include "base/status.h"
#include "forecast/alternatives.h"
#include "forecast/crossover.h"
#include "forecast/simulate.h"

namespace ddl {
namespace {

constexpr double kMessageSeconds = 2e-3;
constexpr double kMostMessage = 256 << 10;

// Bytes per second between ranks of a host if not measured. Never used: there is one rank a host then.
constexpr double kUnknown = 1e10;

// "191 Mbit/s" of bytes per second.
std::string bits(double bytes) {
    const double rate = 8 * bytes;
    const bool giga = rate >= 1e9;
    char text[40];
    std::snprintf(text, sizeof text, rate >= 1e10 || (!giga && rate >= 1e7) ? "%.0f %s" : "%.3g %s",
                  rate / (giga ? 1e9 : 1e6), giga ? "Gbit/s" : "Mbit/s");
    return text;
}

// "2 racks: links 191 Mbit/s, uplinks 95 Mbit/s".
std::string measured(const Tiers& tiers) {
    std::string text = plural(tiers.racks.size(), "rack") + ": links " + bits(tiers.link);
    if (tiers.uplinks.empty()) return text;
    const auto [least, most] = std::minmax_element(tiers.uplinks.begin(), tiers.uplinks.end());
    const bool same = *most < 1.1 * *least;
    const double mean =
        std::accumulate(tiers.uplinks.begin(), tiers.uplinks.end(), 0.0) / static_cast<double>(tiers.uplinks.size());
    return text + ", uplinks " + (same ? bits(mean) : bits(*least) + " to " + bits(*most));
}

// Ranks in the order of racks, hosts and their numbers; the reason says which groups cannot be a dimension.
Plan grouped(const Placement& placement, const Racks& racks) {
    std::vector<int> rack_of_host(static_cast<size_t>(placement.num_hosts), 0);
    for (size_t rack = 0; rack < racks.size(); ++rack) {
        for (const int host : racks[rack]) rack_of_host[static_cast<size_t>(host)] = static_cast<int>(rack);
    }
    std::vector<int> rack_of;
    for (const int host : placement.host_of) rack_of.push_back(rack_of_host[static_cast<size_t>(host)]);
    return plan_of_groups({placement.host_of, rack_of});
}

bool is_even_over_hosts(const Placement& placement) {
    for (size_t rank = 1; rank < placement.host_of.size(); ++rank) {
        if (placement.local_size(static_cast<int>(rank)) != placement.local_size(0)) return false;
    }
    return true;
}

bool same_size(const Racks& racks) {
    return std::all_of(racks.begin(), racks.end(), [&](const auto& rack) { return rack.size() == racks[0].size(); });
}

double least(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

// Ranks a host, hosts a rack, racks, without tiers of size one. Racks of different sizes make no tier: a ring over the
// hosts then runs at the slowest uplink.
Network network_of(const Links& links, int local_size) {
    const Tiers& tiers = links.tiers;
    Network network;
    const double local = links.local_bandwidth > 0 ? links.local_bandwidth : kUnknown;
    network.tiers.push_back({local_size, links.local_latency, local});
    int hosts = 0;
    for (const auto& rack : tiers.racks) hosts += static_cast<int>(rack.size());
    const auto racks = static_cast<int>(tiers.racks.size());
    if (racks > 1 && same_size(tiers.racks)) {
        network.tiers.push_back({hosts / racks, tiers.near, tiers.link});
        network.tiers.push_back({racks, tiers.far, least(tiers.uplinks)});
    } else {
        const double slowest = racks > 1 ? std::min(tiers.link, least(tiers.uplinks)) : tiers.link;
        network.tiers.push_back({hosts, std::max(tiers.near, tiers.far), slowest});
    }
    return network;
}

// A message costs 10 to 20 us beside its bytes. One that keeps its link busy for kMessageSeconds hides that. A longer
// one would only keep other tiers waiting for its chunk, and would not go through a host's memory.
uint64_t message_bytes(const Plan& plan, const Placement& placement, const Links& links) {
    if (plan.modes.find_first_not_of('r') != std::string::npos) return 0;  // NCCL or MPI cuts messages itself
    const bool alone = placement.num_hosts == static_cast<int>(placement.host_of.size());  // one rank a host
    const double least = static_cast<double>(Tuning{}.message_bytes);
    const double most = alone ? kMostMessage : std::max(least, static_cast<double>(links.local_message));
    return static_cast<uint64_t>(std::clamp(links.tiers.link * kMessageSeconds, least, most));
}

std::string doubled(const Plan& plan) {
    if (plan.small_bytes == 0) return "";
    std::string text = "; up to " + std::to_string(plan.small_bytes) + " bytes by recursive doubling";
    const char* before =
        plan.halved_above.size() == 1 ? ", with a halving above " : ", with one more halving above each of ";
    for (const uint64_t bytes : plan.halved_above) text += std::exchange(before, ", ") + std::to_string(bytes);
    return text;
}

// The predicted gain of the dimensions of `plan`.
std::string compared_with_ring(const Network& network, const Plan& plan, const Task& task) {
    if (plan.dimensions.size() == 1) return "one ring over all ranks, as no dimensions are predicted to be faster";
    const double ring = simulate(network, flat_plan(plan.size()), task).seconds;
    char text[40];
    std::snprintf(text, sizeof text, " predicted %.1fx faster than a flat ring",
                  ring / simulate(network, plan, task).seconds);
    return format_dimensions(plan.dimensions) + text;
}

}  // namespace

bool needs_links(const Options& options, const Placement& placement) {
    return placement.num_hosts > 1 && options.modes.find('p') != std::string::npos;
}

Plan choose(const Options& options, const Placement& placement, const Links& links) {
    const Racks& racks = links.tiers.racks;
    Plan plan;
    if (!options.dimensions.empty()) {
        plan = plan_of(options, placement);
        plan.reason = format_dimensions(options.dimensions) + " as DDL_OPTIONS asks, laid over ranks in rack order";
        return laid_over(std::move(plan), placement, links);
    }
    const std::string grouping = grouped(placement, racks).reason;  // why a level cannot be a dimension
    if (!is_even_over_hosts(placement)) {
        plan = flat_plan(static_cast<int>(placement.host_of.size()), grouping);
    } else {
        const Network network = network_of(links, placement.local_size(0));
        const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, kChoiceBytes / 4, 0};
        plan = choose_plan(network, task);
        plan.reason = racks.size() > 1 && !same_size(racks) ? grouping + "; " : "";
        plan.reason += compared_with_ring(network, plan, task);
    }
    return laid_over(std::move(plan), placement, links);
}

double least_seconds_per_byte(const Placement& placement, const Links& links) {
    if (!is_even_over_hosts(placement)) return 0;
    // Cuts grow with the buffer, so any size will do.
    return allreduce_bounds(network_of(links, placement.local_size(0)), kChoiceBytes).cut / kChoiceBytes;
}

Plan laid_over(Plan plan, const Placement& placement, const Links& links) {
    plan.message_bytes = message_bytes(plan, placement, links);
    if (plan.small_bytes == 0 && is_even_over_hosts(placement)) {
        const Network network = network_of(links, placement.local_size(0));
        Plan in_order = make_plan(plan.size(), plan.dimensions, "r");
        in_order.message_bytes = plan.message_bytes;
        set_crossover(in_order, network);
        plan.small_bytes = in_order.small_bytes;
        plan.halved_above = std::move(in_order.halved_above);
    }
    plan.reason = measured(links.tiers) + "; " + plan.reason + doubled(plan);
    return reordered(std::move(plan), grouped(placement, links.tiers.racks).ranks);
}

}  // namespace ddl
