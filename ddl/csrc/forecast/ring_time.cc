#include "forecast/ring_time.h"

#include <algorithm>

#include "base/range.h"
#include "forecast/classes.h"

namespace ddl {
namespace {

struct Hops {
    std::vector<double> seconds_per_byte, latency;
    std::vector<size_t> tier;
};

// The hops of the ring, from each position to the next; nothing if it is no single ring, or two hops share a link.
std::optional<Hops> hops_of(const Network& network, const Layout& layout, const Plan& plan) {
    const bool flat = std::count_if(plan.dimensions.begin(), plan.dimensions.end(), [](int d) { return d > 1; }) == 1;
    if (!flat) return {};
    Hops hops;
    const std::vector<double> capacities = link_capacities(layout);
    std::vector<bool> taken(capacities.size());
    const int size = plan.size();
    for (int at = 0; at < size; ++at) {
        const int from = plan.ranks[static_cast<size_t>(at)], to = plan.ranks[static_cast<size_t>((at + 1) % size)];
        double slowest = 0;
        for (const Use& use : way(layout, from, to)) {
            const auto link = static_cast<size_t>(use.link);
            if (taken[link]) return {};
            taken[link] = true;
            slowest = std::max(slowest, 1 / capacities[link]);
        }
        hops.seconds_per_byte.push_back(slowest);
        hops.tier.push_back(layout.meet(from, to));
        hops.latency.push_back(network.tiers[hops.tier.back()].latency);
    }
    return hops;
}

// A chunk in flight: when each rank's previous round has sent and received its messages.
struct Slot {
    std::vector<double> sent, got;
};

}  // namespace

bool is_alone(const Network& network, const Layout& layout, const Plan& plan) {
    return hops_of(network, layout, plan).has_value();
}

std::optional<RingTime> ring_time(const Network& network, const Layout& layout, const Plan& plan, uint64_t count,
                                  uint64_t element, uint32_t chunks, int window) {
    const auto hops = hops_of(network, layout, plan);
    if (!hops) return {};
    const auto size = static_cast<size_t>(plan.size());
    const double reduce = network.reduce_bandwidth > 0 ? 1 / network.reduce_bandwidth : 0;
    RingTime made;
    made.tier_bytes.resize(network.tiers.size());
    made.tier_messages.resize(network.tiers.size());
    const auto slots = static_cast<uint32_t>(std::max(1, window));
    std::vector<Slot> flying(std::min(slots, chunks), {std::vector<double>(size), std::vector<double>(size)});
    std::vector<double> free(size), reduced(size), ready(size + 1), ends(size);
    const Range all{0, count};
    const auto chunk_of = [&](uint32_t chunk) { return all.part(static_cast<int>(chunk), static_cast<int>(chunks)); };
    // Bytes of each part, listed twice in a row: for most chunks, and for the last chunks, which may be an element
    // shorter.
    std::vector<double> parts[2];
    for (const uint32_t chunk : {0u, chunks - 1}) {
        std::vector<double>& bytes = parts[chunk > 0];
        for (size_t i = 0; i < 2 * size; ++i) {
            const Range part = chunk_of(chunk).part(static_cast<int>(i % size), plan.size());
            bytes.push_back(static_cast<double>(part.size() * element));
        }
    }
    const uint64_t longest = chunk_of(0).size();
    for (uint32_t first = 0; first < chunks; first += slots) {
        const uint32_t end = std::min(first + slots, chunks);
        for (size_t round = 0; round < 2 * (size - 1); ++round) {
            const bool reduces = round < size - 1;
            // Round k of the reduce-scatter sends the part of k + 1 positions back, round k of the allgather that of k.
            const size_t back = reduces ? round + 1 : round - (size - 1);
            for (uint32_t chunk = first; chunk < end; ++chunk) {
                Slot& slot = flying[chunk - first];
                const double* part = parts[chunk_of(chunk).size() < longest].data() + (back == 0 ? 0 : size - back);
                for (size_t i = 0; i < size; ++i) ready[i] = std::max(slot.sent[i], slot.got[i]);
                ready[size] = ready[0];
                for (size_t i = 0; i < size; ++i) {
                    const double start = std::max(std::max(ready[i], ready[i + 1]), free[i]);
                    ends[i] = start + part[i] * hops->seconds_per_byte[i];
                    free[i] = slot.sent[i] = ends[i];
                    ends[i] += hops->latency[i];
                }
                if (reduces && reduce > 0) {
                    for (size_t i = 0; i < size; ++i) {
                        const size_t to = i + 1 < size ? i + 1 : 0;
                        reduced[to] = std::max(reduced[to], ends[i]) + part[i] * reduce;
                        slot.got[to] = reduced[to];
                    }
                } else {
                    for (size_t i = 0; i + 1 < size; ++i) slot.got[i + 1] = ends[i];
                    slot.got[0] = ends[size - 1];
                }
            }
        }
    }
    for (const Slot& slot : flying) {
        for (size_t i = 0; i < size; ++i) made.seconds = std::max({made.seconds, slot.sent[i], slot.got[i]});
    }
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        const Range range = chunk_of(chunk);
        for (size_t i = 0; i < size; ++i) {
            // A rank sends everything twice, except its own final part once, and its neighbour's once.
            const uint64_t own = range.part(static_cast<int>(i), plan.size()).size();
            const uint64_t next = range.part(static_cast<int>((i + 1) % size), plan.size()).size();
            made.tier_bytes[hops->tier[i]] += static_cast<double>((2 * range.size() - own - next) * element);
            made.tier_messages[hops->tier[i]] += 2.0 * static_cast<double>(size - 1);
        }
    }
    for (size_t t = 0; t < network.tiers.size(); ++t) {
        made.tier_bytes[t] /= static_cast<double>(size);
        made.tier_messages[t] /= static_cast<double>(size);
    }
    return made;
}

}  // namespace ddl
