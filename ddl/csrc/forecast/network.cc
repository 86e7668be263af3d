#include "forecast/network.h"

#include <algorithm>
#include <set>

#include "base/status.h"

namespace ddl {
namespace {

constexpr int64_t kMostRanks = 1 << 20;  // far beyond any machine, and far from overflow

// The share of a buffer that each of n ranks sends in a ring.
double share(int n) { return 2.0 * (n - 1) / n; }

// Whether a switch of `tier` has several children: only then do messages turn around there.
bool joins(const Layout& layout, size_t tier) {
    const int switches = tier + 1 < layout.tiers() ? layout.children(tier + 1) : 1;
    return layout.children(tier) > switches;
}

// The child of `tier` with the slowest link; a rank that is alone on its host does not use its own.
int slowest(const Layout& layout, size_t tier) {
    int found = -1;
    for (int child = 0; child < layout.children(tier); ++child) {
        if (tier == 0 && layout.tiers() > 1) {
            const auto [first, end] = layout.ranks(1, layout.child(1, child));
            if (end - first == 1) continue;
        }
        if (found < 0 || layout.bandwidth(tier, child) < layout.bandwidth(tier, found)) found = child;
    }
    return std::max(found, 0);
}

// The term of a dimension of the ranks that meet at `tier`, if no switch is odd in size.
Term term_of(const Network& network, const Layout& layout, size_t tier, double bytes) {
    Term term;
    const int size = network.tiers[tier].size;
    term.latency = 2 * (size - 1) * network.tiers[tier].latency;
    // The ranks below a child of tier j share its link. Together they send S in dimension j, and in dimension i > j
    // the fraction of S that their number is of those below a child of tier i.
    double most = 0;
    for (size_t j = std::min<size_t>(tier, 1); j <= tier; ++j) {
        const double fraction = static_cast<double>(network.stride(j)) / network.stride(tier);
        const int child = slowest(layout, j);
        const double seconds_per_byte = fraction / layout.bandwidth(j, child);
        if (seconds_per_byte <= most) continue;
        most = seconds_per_byte;
        term.bytes = share(size) * bytes * fraction;
        term.capacity = layout.bandwidth(j, child);
        term.tier = static_cast<int>(j);
        term.child = child;
    }
    return term;
}

// The term of one ring over all ranks: each link that it crosses carries the same.
Term ring_of(const Network& network, const Layout& layout, double bytes) {
    Term ring;
    const int size = layout.size();
    double latency = 0;
    for (size_t i = 0; i < layout.tiers(); ++i) {
        if (!joins(layout, i)) continue;
        latency = std::max(latency, network.tiers[i].latency);
        const int child = slowest(layout, i);
        if (ring.tier >= 0 && layout.bandwidth(i, child) >= ring.capacity) continue;
        ring.capacity = layout.bandwidth(i, child);
        ring.tier = static_cast<int>(i);
        ring.child = child;
    }
    ring.latency = 2 * (size - 1) * latency;
    ring.bytes = share(size) * bytes;
    return ring;
}

// Children [first, first + count) of `tier` as groups. `rest` is the capacity of the links from all other ranks into
// these groups; 0: there are no others.
Cut cut_of(const Layout& layout, size_t tier, int first, int count, double rest, double bytes) {
    Cut cut{static_cast<int>(tier), first, count, count + (rest > 0), 0, rest};
    for (int child = first; child < first + count; ++child) cut.capacity += layout.bandwidth(tier, child);
    cut.bytes = 2.0 * (cut.groups - 1) * bytes;
    return cut;
}

Cut cut_of(const Layout& layout, double bytes) {
    Cut best;
    const auto consider = [&](const Cut& cut) {
        if (cut.seconds() > best.seconds() * (1 + 1e-12)) best = cut;
    };
    std::vector<size_t> tiers;
    for (size_t i = 0; i < layout.tiers(); ++i) {
        // A rank reaches other hosts without its tier-0 link, so cuts around ranks count on one host only.
        if (joins(layout, i) && (i > 0 || layout.tiers() == 1 || layout.children(1) == 1)) tiers.push_back(i);
    }
    for (const size_t i : tiers) consider(cut_of(layout, i, 0, layout.children(i), 0, bytes));
    for (const size_t i : tiers) {
        const int alone = slowest(layout, i);
        consider(cut_of(layout, i, alone, 1, layout.bandwidth(i, alone), bytes));
        if (i + 1 == layout.tiers() || layout.children(i + 1) == 1) continue;
        for (int parent = 0; parent < layout.children(i + 1); ++parent) {
            const auto [first, end] = layout.members(i, parent);
            consider(cut_of(layout, i, first, end - first, layout.bandwidth(i + 1, parent), bytes));
        }
    }
    return best;
}

}  // namespace

int Network::children(size_t t) const {
    int64_t count = 1;  // of the switches of each tier, outermost first
    for (size_t i = tiers.size(); i-- > t;) {
        count *= tiers[i].size;
        for (const Odd& one : odd) {
            if (one.size > 0 && one.tier == static_cast<int>(i) + 1) count += one.size - tiers[i].size;
        }
        count = std::min(count, kMostRanks + 1);  // far enough for check()
    }
    return static_cast<int>(count);
}

int Network::size() const { return children(0); }

int Network::stride(size_t tier) const {
    int product = 1;
    for (size_t i = 0; i < tier; ++i) product *= tiers[i].size;
    return product;
}

bool Network::is_even(size_t t) const {
    return std::none_of(odd.begin(), odd.end(), [&](const Odd& one) {
        return one.tier == static_cast<int>(t) + 1 && one.size > 0 && one.size != tiers[t].size;
    });
}

Layout::Layout(const Network& network) {
    const size_t tiers = network.tiers.size();
    child_of_.resize(tiers);
    first_rank_.resize(tiers);
    bandwidth_.resize(tiers);
    // Outermost first: the parent of each child, in the tier above.
    std::vector<std::vector<int>> parent(tiers);
    for (size_t i = tiers; i-- > 0;) {
        const int switches = i + 1 < tiers ? static_cast<int>(parent[i + 1].size()) : 1;
        std::vector<int> sizes(static_cast<size_t>(switches), network.tiers[i].size);
        for (const Odd& one : network.odd) {
            if (one.tier == static_cast<int>(i) + 1 && one.size > 0) sizes[static_cast<size_t>(one.child)] = one.size;
        }
        for (int s = 0; s < switches; ++s)
            parent[i].insert(parent[i].end(), static_cast<size_t>(sizes[static_cast<size_t>(s)]), s);
        bandwidth_[i].assign(parent[i].size(), network.tiers[i].bandwidth);
        for (const Odd& one : network.odd) {
            if (one.tier == static_cast<int>(i) && one.bandwidth > 0) {
                bandwidth_[i][static_cast<size_t>(one.child)] = one.bandwidth;
            }
        }
    }
    child_of_[0].resize(parent[0].size());
    for (size_t rank = 0; rank < parent[0].size(); ++rank) child_of_[0][rank] = static_cast<int>(rank);
    for (size_t i = 1; i < tiers; ++i) {
        for (const int child : child_of_[i - 1]) child_of_[i].push_back(parent[i - 1][static_cast<size_t>(child)]);
    }
    for (size_t i = 0; i < tiers; ++i) {
        for (size_t rank = 0; rank < child_of_[i].size(); ++rank) {
            if (rank == 0 || child_of_[i][rank] != child_of_[i][rank - 1]) {
                first_rank_[i].push_back(static_cast<int>(rank));
            }
        }
        first_rank_[i].push_back(size());
    }
}

std::pair<int, int> Layout::ranks(size_t tier, int child) const {
    const auto at = static_cast<size_t>(child);
    return {first_rank_[tier][at], first_rank_[tier][at + 1]};
}

std::pair<int, int> Layout::members(size_t tier, int parent) const {
    const auto [first, end] = ranks(tier + 1, parent);
    return {child(tier, first), child(tier, end - 1) + 1};
}

size_t Layout::meet(int a, int b) const {
    size_t tier = 0;
    while (tier + 1 < tiers() && child(tier + 1, a) != child(tier + 1, b)) ++tier;
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
    std::vector<Odd> odd = network.odd;  // outermost first, because sizes determine the children of inner tiers
    std::sort(odd.begin(), odd.end(), [](const Odd& a, const Odd& b) { return a.tier > b.tier; });
    std::set<std::pair<int, int>> seen;
    for (const Odd& one : odd) {
        const std::string name = "odd child " + std::to_string(one.child) + " of tier " + std::to_string(one.tier);
        if (one.tier < 0 || one.tier >= static_cast<int>(network.tiers.size())) {
            throw Error(DDL_ERROR_ARGUMENT,
                        name + ": the network has " + std::to_string(network.tiers.size()) + " tiers, counted from 0");
        }
        const int children = network.children(static_cast<size_t>(one.tier));
        if (one.child < 0 || one.child >= children) {
            throw Error(DDL_ERROR_ARGUMENT,
                        name + ": the tier has " + std::to_string(children) + " children, counted from 0");
        }
        if (one.size < 0 || (one.tier == 0 && one.size > 0)) {
            throw Error(DDL_ERROR_ARGUMENT,
                        name + ": its size is " + std::to_string(one.size) + ", but must be " +
                            (one.tier == 0 ? "0: a rank has nothing below it" : "1 or more, or 0: as the others"));
        }
        if (!(one.bandwidth >= 0)) {
            throw Error(DDL_ERROR_ARGUMENT, name + ": its bandwidth is " + std::to_string(one.bandwidth) +
                                                " bytes per second, but must be above 0, or 0: as the others");
        }
        if (!seen.emplace(one.tier, one.child).second) throw Error(DDL_ERROR_ARGUMENT, name + " is listed twice");
    }
    if (network.size() > kMostRanks) {
        throw Error(DDL_ERROR_ARGUMENT, "the network has more than " + std::to_string(kMostRanks) + " ranks");
    }
}

Bounds allreduce_bounds(const Network& network, uint64_t bytes) {
    check(network);
    const auto all = static_cast<double>(bytes);
    const Layout layout(network);
    Bounds bounds;
    bounds.tier_terms.resize(network.tiers.size());
    bool even = true;
    for (size_t i = 0; i < network.tiers.size(); ++i) even &= network.is_even(i);
    for (size_t i = 0; even && i < network.tiers.size(); ++i) {
        if (network.tiers[i].size < 2) continue;
        bounds.tier_terms[i] = term_of(network, layout, i, all);
        const double seconds = bounds.tier_terms[i].seconds();
        bounds.hierarchical += seconds;
        bounds.pipelined = std::max(bounds.pipelined, seconds);
    }
    if (network.size() > 1) bounds.ring_term = ring_of(network, layout, all);
    bounds.ring = bounds.ring_term.seconds();
    bounds.cut_witness = cut_of(layout, all);
    bounds.cut = bounds.cut_witness.seconds();
    return bounds;
}

}  // namespace ddl
