#include "forecast/crossover.h"

#include <algorithm>
#include <map>
#include <vector>

#include "forecast/simulate.h"

namespace ddl {
namespace {

// Bytes of a message beside its payload: the headers of Ethernet, IP, TCP, MPI and ours. The simulation and the bounds
// leave them out, but here they decide: more rounds pay them more often.
constexpr uint64_t kFraming = 125;
constexpr double kMargin = 1.1;  // each additional round may have to wait for a late rank

// Seconds of a round in which each of `positions` sends `bytes` to the position whose index differs in `bit`.
double round_seconds(const Network& network, const Layout& layout, const std::vector<int>& positions, size_t bit,
                     uint64_t bytes) {
    const auto size = static_cast<double>(bytes);
    std::vector<std::map<int, int>> senders(network.tiers.size());  // by tier and child
    double latency = 0, travel = 0;
    for (size_t i = 0; i < positions.size(); ++i) {
        const size_t meet = layout.meet(positions[i], positions[i ^ bit]);
        latency = std::max(latency, network.tiers[meet].latency);
        travel = std::max(travel, size / layout.bandwidth(0, positions[i]));
        for (size_t tier = 1; tier <= meet; ++tier) ++senders[tier][layout.child(tier, positions[i])];
    }
    for (size_t tier = 1; tier < senders.size(); ++tier) {
        for (const auto& [child, count] : senders[tier]) {
            travel = std::max(travel, size * count / layout.bandwidth(tier, child));
        }
    }
    return latency + travel;
}

// The seconds that framing adds to the plan's dimensions: in a round all ranks below a link send a message through it.
double framing_seconds(const Network& network, const Layout& layout, const Plan& plan) {
    size_t tier = 0;  // the outermost tier that the dimension reaches
    int reached = network.tiers[0].size, product = 1;
    double seconds = 0;
    for (const int dimension : plan.dimensions) {
        product *= dimension;
        while (reached < product && tier + 1 < network.tiers.size()) reached *= network.tiers[++tier].size;
        if (tier == 0) continue;
        double slowest = 0;
        for (int child = 0; child < layout.children(tier); ++child) {
            const auto [first, end] = layout.ranks(tier, child);
            slowest = std::max(slowest, static_cast<double>(kFraming) * (end - first) / layout.bandwidth(tier, child));
        }
        seconds += 2 * (dimension - 1) * slowest;
    }
    return seconds;
}

}  // namespace

double doubling_seconds(const Network& network, uint64_t bytes) {
    const Layout layout(network);
    const int size = network.size();
    int power = 1;
    while (power * 2 <= size) power *= 2;
    // As in build_doubling(): the first even positions are folded into their neighbours, and get the result from them.
    const int folded = size - power;
    double seconds = 0;
    if (folded > 0) seconds += 2 * round_seconds(network, layout, {0, 1}, 1, bytes);
    std::vector<int> positions;
    for (int i = 0; i < power; ++i) positions.push_back(i < folded ? 2 * i + 1 : i + folded);
    for (int bit = 1; bit < power; bit *= 2) {
        seconds += round_seconds(network, layout, positions, static_cast<size_t>(bit), bytes);
    }
    return seconds;
}

uint64_t crossover(const Network& network, const Plan& plan, const Tuning& tuning) {
    check(network);
    const auto unknown = [](const Tier& tier) { return tier.size > 1 && tier.latency <= 0; };
    if (network.size() < 2 || std::any_of(network.tiers.begin(), network.tiers.end(), unknown)) return 0;
    const Layout layout(network);
    Tuning by_dimensions = tuning;
    by_dimensions.algorithm = Algorithm::bandwidth;
    const auto allreduce = [](uint64_t bytes) {
        return Task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, bytes / size_of(DDL_FLOAT32), 0};
    };
    const auto is_faster = [&](uint64_t bytes) {
        const double others =
            simulate(network, plan, allreduce(bytes), by_dimensions).seconds + framing_seconds(network, layout, plan);
        return doubling_seconds(network, bytes + kFraming) <= kMargin * others;
    };
    // With less than an element a rank, there is nothing to divide among the dimensions.
    uint64_t small = 128;
    while (2 * small < static_cast<uint64_t>(network.size()) * size_of(DDL_FLOAT32)) small *= 2;
    if (!is_quick(network, plan, allreduce(2 * small), by_dimensions)) return 0;
    // The more bytes, the better are the dimensions. So search by halves, as simulating thousands of ranks takes a
    // while.
    int below = 0, beyond = 1;  // powers: doubling is faster at `small` times 2 to `below`, but not to `beyond`
    while (small << beyond <= kMostDoubled) ++beyond;
    while (beyond - below > 1) {
        const int middle = (below + beyond) / 2;
        (is_faster(small << middle) ? below : beyond) = middle;
    }
    return std::clamp(small << below, kLeastDoubled, kMostDoubled);
}

}  // namespace ddl
