#include "forecast/part.h"

#include <algorithm>
#include <set>

namespace ddl {
namespace {

// The members' hosts, by the world's numbers, ascending.
std::vector<int> hosts_of(const Placement& world, const std::vector<int>& members) {
    std::set<int> hosts;
    for (const int member : members) hosts.insert(world.host_of[static_cast<size_t>(member)]);
    return {hosts.begin(), hosts.end()};
}

// The part's number for a host of the world; -1 if the part has no rank there.
int number_of(const std::vector<int>& hosts, int host) {
    const auto found = std::lower_bound(hosts.begin(), hosts.end(), host);
    return found != hosts.end() && *found == host ? static_cast<int>(found - hosts.begin()) : -1;
}

Placement placement_of(const Placement& world, const std::vector<int>& members, const std::vector<int>& hosts) {
    Placement part;
    for (const int member : members) {
        part.host_of.push_back(number_of(hosts, world.host_of[static_cast<size_t>(member)]));
    }
    part.num_hosts = static_cast<int>(hosts.size());
    return part;
}

// The measured links of these hosts, with only the racks that they are in.
Links links_of(const Links& world, const std::vector<int>& hosts) {
    std::vector<std::pair<std::vector<int>, double>> racks;  // with their uplinks
    for (size_t i = 0; i < world.tiers.racks.size(); ++i) {
        std::vector<int> rack;
        for (const int host : world.tiers.racks[i]) {
            if (const int number = number_of(hosts, host); number >= 0) rack.push_back(number);
        }
        const double uplink = world.tiers.uplinks.empty() ? 0 : world.tiers.uplinks[i];
        if (!rack.empty()) racks.emplace_back(std::move(rack), uplink);
    }
    std::sort(racks.begin(), racks.end());  // by their first host, which may have changed
    Links part = world;
    part.tiers.racks.clear();
    part.tiers.uplinks.clear();
    for (auto& [rack, uplink] : racks) {
        part.tiers.racks.push_back(std::move(rack));
        if (racks.size() > 1) part.tiers.uplinks.push_back(uplink);
    }
    if (racks.size() == 1) part.tiers.far = 0;
    return part;
}

}  // namespace

Plan plan_of_part(const Basis& basis, const Plan& world, const std::vector<int>& members) {
    Plan plan = plan_of_part(world, members);
    if (plan.size() == world.size()) {
        plan.reason = "all ranks: " + world.reason;
        return plan;
    }
    const std::vector<int> hosts = hosts_of(basis.placement, members);
    if (hosts.size() == 1) {
        plan.reason = "ranks of one host: the dimensions of all ranks, as far as these ranks fill them";
        return plan;
    }
    if (!basis.links) {
        plan.reason = "links were not measured, so it follows the plan of all ranks: " + plan.reason;
        return plan;
    }
    const Placement placement = placement_of(basis.placement, members, hosts);
    const Links links = links_of(*basis.links, hosts);
    if (basis.options.dimensions.empty()) return choose(basis.options, placement, links);
    plan.reason = "the part that these ranks fill of the dimensions in DDL_OPTIONS: " + plan.reason;
    std::vector<int> order = plan.ranks;  // the world's order
    return reordered(laid_over(std::move(plan), placement, links), std::move(order));
}

}  // namespace ddl
