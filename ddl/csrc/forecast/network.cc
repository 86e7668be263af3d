#include "forecast/network.h"

#include <algorithm>

#include "base/status.h"

namespace ddl {
namespace {

constexpr int64_t kMostRanks = 1 << 20;  // far beyond any machine, and far from overflow

}  // namespace

int Network::size() const { return stride(tiers.size()); }

int Network::stride(size_t tier) const {
    int product = 1;
    for (size_t i = 0; i < tier; ++i) product *= tiers[i].size;
    return product;
}

size_t Network::meet(int a, int b) const {
    size_t tier = 0;
    while (tier + 1 < tiers.size() && a / stride(tier + 1) != b / stride(tier + 1)) ++tier;
    return tier;
}

void check(const Network& network) {
    if (network.tiers.empty()) throw Error(DDL_ERROR_ARGUMENT, "a network has at least one tier: the ranks of a host");
    const auto refuse = [](size_t tier, const std::string& what) {
        throw Error(DDL_ERROR_ARGUMENT, "tier " + std::to_string(tier) + " of the network: " + what);
    };
    int64_t ranks = 1;
    for (size_t i = 0; i < network.tiers.size(); ++i) {
        const Tier& tier = network.tiers[i];
        if (tier.size < 1) refuse(i, "its size is " + std::to_string(tier.size) + ", but must be 1 or more");
        if (!(tier.bandwidth > 0)) {
            refuse(i, "its bandwidth is " + std::to_string(tier.bandwidth) + " bytes per second, but must be above 0");
        }
        if (!(tier.latency >= 0)) {
            refuse(i, "its latency is " + std::to_string(tier.latency) + " seconds, but must be 0 or more");
        }
        ranks *= tier.size;
        if (ranks > kMostRanks) {
            refuse(i,
                   "up to it there are " + std::to_string(ranks) + " ranks, more than " + std::to_string(kMostRanks));
        }
    }
    if (!(network.reduce_bandwidth >= 0)) {
        throw Error(DDL_ERROR_ARGUMENT, "the network's reduce bandwidth is " +
                                            std::to_string(network.reduce_bandwidth) +
                                            " bytes per second, but must be 0 (takes no time) or more");
    }
}

Bounds allreduce_bounds(const Network& network, uint64_t bytes) {
    check(network);
    const int size = network.size();
    const auto all = static_cast<double>(bytes);
    // What one of n ranks sends of a buffer shared by them.
    const auto share = [](int n) { return 2.0 * (n - 1) / n; };
    Bounds bounds;
    double latency = 0, slowest = 0;  // seconds; seconds per byte
    for (size_t i = 0; i < network.tiers.size(); ++i) {
        const Tier& tier = network.tiers[i];
        if (tier.size < 2) continue;
        latency = std::max(latency, tier.latency);
        slowest = std::max(slowest, 1 / tier.bandwidth);
        // The ranks below a child of tier j share its link. Together they send S in dimension j, and in dimension i > j
        // the fraction of S that their number is of those below a child of tier i.
        double seconds_per_byte = 0;
        for (size_t j = std::min<size_t>(i, 1); j <= i; ++j) {
            const double fraction = static_cast<double>(network.stride(j)) / network.stride(i);
            seconds_per_byte = std::max(seconds_per_byte, fraction / network.tiers[j].bandwidth);
        }
        const double term = 2 * (tier.size - 1) * tier.latency + share(tier.size) * all * seconds_per_byte;
        bounds.hierarchical += term;
        bounds.pipelined = std::max(bounds.pipelined, term);
        const int groups = size / network.stride(i);
        // Around a rank the cut passes its link of tier 0 and its host's as well: alone it binds on one host only.
        if (i > 0 || network.stride(1) == size) {
            bounds.cut = std::max(bounds.cut, share(groups) * all / tier.bandwidth);
        }
    }
    bounds.ring = 2 * (size - 1) * latency + share(size) * all * slowest;
    return bounds;
}

}  // namespace ddl
