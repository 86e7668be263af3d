#include "forecast/crossover.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "forecast/simulate.h"

namespace ddl {
namespace {

// Bytes of a message beside its payload: the headers of Ethernet, IP, TCP, MPI and ours. The simulation and the bounds
// leave them out, but here they decide: more rounds pay them more often.
constexpr double kFraming = 125;
constexpr double kMargin = 1.1;  // additional rounds may have to wait for late ranks

// A round in which each rank sends the same number of bytes to one other.
struct Round {
    double latency = 0, per_byte = 0;  // seconds
    double seconds(double payload) const { return latency + per_byte * (payload + kFraming); }
};

// Each of `positions` sends to the one whose index differs in `bit`: all ranks below a link send through it at once.
Round round_of(const Network& network, const Layout& layout, const std::vector<int>& positions, size_t bit) {
    std::vector<std::map<int, int>> senders(network.tiers.size());  // by tier and child
    Round round;
    for (size_t i = 0; i < positions.size(); ++i) {
        const size_t meet = layout.meet(positions[i], positions[i ^ bit]);
        round.latency = std::max(round.latency, network.tiers[meet].latency);
        round.per_byte = std::max(round.per_byte, 1 / layout.bandwidth(0, positions[i]));
        for (size_t tier = 1; tier <= meet; ++tier) ++senders[tier][layout.child(tier, positions[i])];
    }
    for (size_t tier = 1; tier < senders.size(); ++tier) {
        for (const auto& [child, count] : senders[tier]) {
            round.per_byte = std::max(round.per_byte, count / layout.bandwidth(tier, child));
        }
    }
    return round;
}

// The rounds of build_doubling(), with ranks in the network's order.
class Doubling {
  public:
    Doubling(const Network& network, const Layout& layout) {
        const int size = network.size();
        int power = 1;
        while (power * 2 <= size) power *= 2;
        const int folded = size - power;
        std::vector<int> positions(2 * static_cast<size_t>(folded));
        std::iota(positions.begin(), positions.end(), 0);
        if (folded > 0) folds_.assign(2, round_of(network, layout, positions, 1));
        positions.clear();
        for (int i = 0; i < power; ++i) positions.push_back(i < folded ? 2 * i + 1 : i + folded);
        for (int bit = 1; bit < power; bit *= 2) {
            rounds_.push_back(round_of(network, layout, positions, static_cast<size_t>(bit)));
        }
    }

    double seconds(uint64_t bytes, size_t halvings) const {
        double seconds = 0, left = static_cast<double>(bytes);
        for (const Round& fold : folds_) seconds += fold.seconds(left);
        for (size_t i = 0; i < rounds_.size(); ++i) {
            if (i < halvings) left /= 2;
            seconds += (i < halvings ? 2 : 1) * rounds_[i].seconds(left);
        }
        return seconds;
    }

    // The fewest halvings that are not much slower than another number of them.
    size_t halvings(uint64_t bytes) const {
        std::vector<double> each;
        for (size_t k = 0; k <= rounds_.size(); ++k) each.push_back(seconds(bytes, k));
        const double most = kMargin * *std::min_element(each.begin(), each.end());
        const auto found = std::find_if(each.begin(), each.end(), [&](double seconds) { return seconds <= most; });
        return static_cast<size_t>(found - each.begin());
    }

  private:
    std::vector<Round> folds_, rounds_;
};

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
            slowest = std::max(slowest, kFraming * (end - first) / layout.bandwidth(tier, child));
        }
        seconds += 2 * (dimension - 1) * slowest;
    }
    return seconds;
}

}  // namespace

void set_crossover(Plan& plan, const Network& network) {
    check(network);
    plan.small_bytes = 0;
    plan.halved_above.clear();
    const auto unknown = [](const Tier& tier) { return tier.size > 1 && tier.latency <= 0; };
    if (network.size() < 2 || std::any_of(network.tiers.begin(), network.tiers.end(), unknown)) return;
    const Layout layout(network);
    const Doubling doubling(network, layout);
    const Tuning by_dimensions{Algorithm::bandwidth};
    const auto allreduce = [](uint64_t bytes) {
        return Task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, bytes / size_of(DDL_FLOAT32), 0};
    };
    const auto is_faster = [&](uint64_t bytes) {
        const double others =
            simulate(network, plan, allreduce(bytes), by_dimensions).seconds + framing_seconds(network, layout, plan);
        return doubling.seconds(bytes, doubling.halvings(bytes)) <= kMargin * others;
    };
    // With less than an element a rank, there is nothing to divide among the dimensions.
    uint64_t small = 128;
    while (2 * small < static_cast<uint64_t>(network.size()) * size_of(DDL_FLOAT32)) small *= 2;
    if (!is_quick(network, plan, allreduce(2 * small), by_dimensions)) return;
    // The more bytes, the better are the dimensions. So search by halves, as simulating thousands of ranks takes a
    // while.
    int below = 0, beyond = 1;  // powers: doubling is faster at `small` times 2 to `below`, but not to `beyond`
    while (small << beyond <= kMostDoubled) ++beyond;
    while (beyond - below > 1) {
        const int middle = (below + beyond) / 2;
        (is_faster(small << middle) ? below : beyond) = middle;
    }
    plan.small_bytes = std::clamp(small << below, kLeastDoubled, kMostDoubled);
    // The more bytes, the more halvings.
    for (uint64_t bytes = small; bytes <= plan.small_bytes; bytes *= 2) {
        const size_t halvings = doubling.halvings(bytes);
        while (plan.halved_above.size() < halvings) plan.halved_above.push_back(bytes / 2);
    }
}

}  // namespace ddl
