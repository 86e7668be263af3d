#include "forecast/classes.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>

namespace ddl {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) {  // splitmix64's finaliser
    uint64_t x = hash ^ (value + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2));
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

uint64_t bits_of(double value) {
    uint64_t bits = 0;
    static_assert(sizeof bits == sizeof value);
    std::copy_n(reinterpret_cast<const char*>(&value), sizeof value, reinterpret_cast<char*>(&bits));
    return bits;
}

// The paths of all ranks in all dimensions of a plan.
struct Rings {
    struct Hop {
        int from, to;
        size_t dimension;
        uint64_t about;  // the initial color of all ranks
        std::vector<Use> links;
    };
    Rings(const Network& network, const Layout& layout, const Plan& plan) {
        for (size_t d = 0; d < plan.dimensions.size(); ++d) {
            if (plan.dimensions[d] < 2) continue;
            for (int rank = 0; rank < plan.size(); ++rank) {
                const int to = next_in_ring(plan, rank, d);
                const double latency = network.tiers[layout.meet(rank, to)].latency;
                hops.push_back({rank, to, d, mix(d, bits_of(latency)), way(layout, rank, to)});
            }
        }
    }
    std::vector<Hop> hops;
};

}  // namespace

int link_of(const Layout& layout, size_t tier, int rank, bool up) {
    int first = 0;
    for (size_t t = 0; t < tier; ++t) first += 2 * layout.children(t);
    return first + 2 * layout.child(tier, rank) + (up ? 0 : 1);
}

std::vector<double> link_capacities(const Layout& layout) {
    std::vector<double> capacities;
    for (size_t t = 0; t < layout.tiers(); ++t) {
        for (int child = 0; child < layout.children(t); ++child) {
            capacities.insert(capacities.end(), 2, layout.bandwidth(t, child));
        }
    }
    return capacities;
}

std::vector<Use> way(const Layout& layout, int from, int to) {
    std::vector<Use> uses;
    const size_t tier = layout.meet(from, to);
    for (size_t t = std::min<size_t>(tier, 1); t <= tier; ++t) {
        uses.push_back({link_of(layout, t, from, true), 1});
        uses.push_back({link_of(layout, t, to, false), 1});
    }
    return uses;
}

int next_in_ring(const Plan& plan, int rank, size_t dimension) {
    const int position = plan.positions[static_cast<size_t>(rank)];
    const int size = plan.dimensions[dimension], stride = plan.stride(dimension);
    const int at = position / stride % size;
    return plan.ranks[static_cast<size_t>(position + ((at + 1) % size - at) * stride)];
}

Classes each_alone(int size) {
    Classes classes;
    classes.of.resize(static_cast<size_t>(size));
    std::iota(classes.of.begin(), classes.of.end(), 0);
    classes.first = classes.of;
    classes.count.assign(static_cast<size_t>(size), 1);
    return classes;
}

Classes alike(const Network& network, const Layout& layout, const Plan& plan) {
    const auto size = static_cast<size_t>(plan.size());
    const Rings rings(network, layout, plan);
    const std::vector<double> capacities = link_capacities(layout);
    std::vector<uint64_t> colors(size, 0), links(capacities.size());
    Classes classes;
    classes.of.assign(size, 0);
    classes.first = {0};
    for (;;) {
        for (size_t l = 0; l < links.size(); ++l) links[l] = bits_of(capacities[l]);
        for (const auto& hop : rings.hops) {
            const uint64_t passing = mix(mix(hop.about, colors[static_cast<size_t>(hop.from)]), 1);
            for (const Use& use : hop.links) links[static_cast<size_t>(use.link)] += passing;  // in any order
        }
        std::vector<uint64_t> refined = colors;
        for (const auto& hop : rings.hops) {
            const auto from = static_cast<size_t>(hop.from), to = static_cast<size_t>(hop.to);
            uint64_t seen = mix(hop.about, colors[to]), met = mix(hop.about, colors[from]);
            for (const Use& use : hop.links) seen = mix(seen, links[static_cast<size_t>(use.link)]);
            refined[from] += mix(seen, 2);
            refined[to] += mix(met, 3);
        }
        std::unordered_map<uint64_t, int> numbers;
        Classes finer;
        for (size_t rank = 0; rank < size; ++rank) {
            // Ranks of different classes stay apart, whatever the hashes are.
            const uint64_t color = mix(refined[rank], static_cast<uint64_t>(classes.of[rank]));
            const auto [found, added] = numbers.emplace(color, static_cast<int>(finer.first.size()));
            if (added) {
                finer.first.push_back(static_cast<int>(rank));
                finer.count.push_back(0);
            }
            finer.of.push_back(found->second);
            ++finer.count[static_cast<size_t>(found->second)];
        }
        if (2 * finer.first.size() > size) return each_alone(plan.size());
        const bool done = finer.first.size() == classes.first.size();
        classes = std::move(finer);
        for (size_t rank = 0; rank < size; ++rank) colors[rank] = mix(static_cast<uint64_t>(classes.of[rank]), 4);
        if (done) break;
    }
    // The first link of each kind stands for all of its kind.
    std::unordered_map<uint64_t, int> kinds;
    for (size_t l = links.size(); l-- > 0;) kinds[links[l]] = static_cast<int>(l);
    const size_t dimensions = plan.dimensions.size();
    std::vector<std::map<int, int>> copies(classes.first.size() * dimensions);
    for (const auto& hop : rings.hops) {
        for (const Use& use : hop.links) {
            if (kinds[links[static_cast<size_t>(use.link)]] != use.link) continue;
            const auto of = static_cast<size_t>(classes.of[static_cast<size_t>(hop.from)]);
            ++copies[of * dimensions + hop.dimension][use.link];
        }
    }
    for (const auto& all : copies) {
        auto& uses = classes.uses.emplace_back();
        for (const auto& [link, count] : all) uses.push_back({link, count});
    }
    return classes;
}

}  // namespace ddl
