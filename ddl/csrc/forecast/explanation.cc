#include "forecast/explanation.h"

#include <algorithm>
#include <cmath>

namespace ddl {
namespace {

// The price of another rack, in logarithms of likelihood. It grows with the hosts, because one of many partitions
// explains noise by chance, and with the flows, because noise is not always normal.
constexpr double kHostPrice = 2, kFlowPrice = 0.05;
constexpr double kManyFlows =
    170;  // as with 8 hosts: with more, a search that starts from many small racks would cost too much
constexpr double kWide = 0.85;  // of what a rack's hosts can send: an uplink that carries more is no bottleneck
constexpr double kLoose =
    1.05;  // times the most seen over an uplink, so that an idle uplink does not look like a bottleneck
constexpr int kRefinements = 3;       // of the rates of uplinks
constexpr double kQuiet = 0.1;        // noise below which nothing is explained by racks: logarithms of ratios
constexpr double kFar = 0.3;          // a logarithm of a ratio beyond which it counts linearly: see misfit()
constexpr double kHopeless = 1.5;     // one beyond which slower flows count alike
constexpr double kFasterWeight = 3;   // of a flow that is faster than predicted
constexpr double kLinkShare = 0.75;   // of the flows within racks count as disturbed; the others show a link's rate
constexpr double kUplinkShare = 0.7;  // the same for the flows that an uplink limits

// The quantile of the values; reorders them.
double quantile(std::vector<double>& values, double share) {
    const double last = static_cast<double>(values.size() - 1);
    const auto at = values.begin() + std::lround(share * last);
    std::nth_element(values.begin(), at, values.end());
    return *at;
}

// The cost of a flow whose rate is `ratio` times the prediction. Disturbances make flows slower: a rank that waits for
// its core, a lost packet. So a faster flow costs more, and the cost of a much slower one is limited. Small deviations
// count by their square, large ones linearly: Huber's loss (Ann. Math. Statist. 35, 1964).
double misfit(double ratio) {
    const double deviation = std::log(ratio);
    const double x = deviation > 0 ? deviation : std::min(-deviation, kHopeless);
    return (deviation > 0 ? kFasterWeight : 1) * (x < kFar ? x * x : kFar * (2 * x - kFar));
}

}  // namespace

Partition::Partition(std::vector<int> of) : rack_of(std::move(of)) {
    std::vector<int> numbers(rack_of.size() + 1, -1);
    for (int& rack : rack_of) {
        int& number = numbers[index(rack)];
        if (number < 0) number = racks++;
        rack = number;
    }
}

Racks Partition::groups() const {
    Racks found(index(racks));
    for (size_t host = 0; host < rack_of.size(); ++host) {
        found[index(rack_of[host])].push_back(static_cast<int>(host));
    }
    return found;
}

Explanation::Explanation(const Measurement& measured) : measured_(measured) {
    for (const auto& flows : measured.rounds) {
        flows_ += static_cast<double>(flows.size());
        for (const Flow& flow : flows) fastest_ = std::max(fastest_, flow.bandwidth);
    }
    price_of_rack_ = kHostPrice * std::min(measured.hosts, kExhaustive) + kFlowPrice * std::min(flows_, kManyFlows);
}

double Explanation::price(const Partition& partition) {
    if (partition.racks == measured_.hosts && measured_.hosts > 1) return kInfinite;
    return flows_ * std::log(cost(partition) / flows_ + kQuiet * kQuiet) + price_of_rack_ * (partition.racks - 1);
}

double Explanation::cost(const Partition& partition) {
    fit(partition);
    double total = 0;
    for (const auto& flows : measured_.rounds) {
        share(partition, flows);
        for (size_t i = 0; i < flows.size(); ++i) total += misfit(flows[i].bandwidth / rates_[i]);
    }
    return total;
}

// The number of racks whose uplink carries about all that their hosts can send; two such racks are really one.
int Explanation::wide_racks(const Partition& partition) const {
    std::vector<int> hosts(index(partition.racks));
    for (const int rack : partition.rack_of) ++hosts[index(rack)];
    int wide = 0;
    for (size_t rack = 0; rack < hosts.size(); ++rack) wide += uplinks[rack] > kWide * hosts[rack] * link;
    return wide;
}

// Finds the rates of links and uplinks that explain the flows best, for given racks. A link's rate is the upper
// quartile within racks. An uplink carries at least the most that was seen over it at once. Starting a little above
// that, its rate is corrected by the flows that it limits.
void Explanation::fit(const Partition& partition) {
    const auto& rack_of = partition.rack_of;
    values_.clear();
    std::vector<double> seen(index(partition.racks), 0), sums(index(2 * partition.racks));
    for (const auto& flows : measured_.rounds) {
        std::fill(sums.begin(), sums.end(), 0);
        for (const Flow& flow : flows) {
            const int source = rack_of[index(flow.source)], target = rack_of[index(flow.target)];
            if (source == target) {
                values_.push_back(flow.bandwidth);
            } else {
                sums[index(2 * source)] += flow.bandwidth;
                sums[index(2 * target + 1)] += flow.bandwidth;
            }
        }
        for (size_t at = 0; at < sums.size(); ++at) seen[at / 2] = std::max(seen[at / 2], sums[at]);
    }
    link = values_.empty() ? fastest_ : quantile(values_, kLinkShare);
    for (double& rate : seen) {
        rate = rate == 0 ? link : rate * kLoose;
    }
    uplinks = std::move(seen);
    std::vector<std::vector<double>> wrong(index(partition.racks));
    for (int again = 0; again < kRefinements; ++again) {
        for (const auto& flows : measured_.rounds) {
            share(partition, flows);
            for (size_t i = 0; i < flows.size(); ++i) {
                if (narrowest_[i] >= 0) wrong[index(narrowest_[i])].push_back(flows[i].bandwidth / rates_[i]);
            }
        }
        for (size_t rack = 0; rack < wrong.size(); ++rack) {
            if (!wrong[rack].empty()) uplinks[rack] *= quantile(wrong[rack], kUplinkShare);
            wrong[rack].clear();
        }
    }
}

// Computes the rate of each flow of a round, and the rack whose uplink limits it (-1: its own link). The flows of the
// narrowest uplink share it equally, then the remaining flows share the next.
void Explanation::share(const Partition& partition, const std::vector<Flow>& flows) {
    const size_t ways = index(2 * partition.racks);  // up from each rack and down to it
    left_.assign(ways, 0);
    users_.assign(ways, 0);
    rates_.assign(flows.size(), link);
    narrowest_.assign(flows.size(), -1);
    open_.clear();
    for (size_t i = 0; i < flows.size(); ++i) {
        const int source = partition.rack_of[index(flows[i].source)];
        const int target = partition.rack_of[index(flows[i].target)];
        if (source == target) continue;
        open_.push_back({i, index(2 * source), index(2 * target + 1)});
        for (const size_t way : {open_.back().up, open_.back().down}) {
            left_[way] = uplinks[way / 2];
            ++users_[way];
        }
    }
    effort += static_cast<double>(flows.size() + ways);
    while (!open_.empty()) {
        double least = kInfinite;
        size_t narrow = 0;
        for (size_t way = 0; way < ways; ++way) {
            if (users_[way] == 0) continue;
            const double each = left_[way] / users_[way];
            if (each < least) {
                least = each;
                narrow = way;
            }
        }
        effort += static_cast<double>(ways + open_.size());
        if (least >= link) return;
        size_t kept = 0;
        for (const Open& one : open_) {
            if (one.up != narrow && one.down != narrow) {
                open_[kept++] = one;
                continue;
            }
            // Rounding must not make a rate zero or negative: logarithms are taken of rates.
            rates_[one.flow] = std::max(least, link * 1e-6);
            narrowest_[one.flow] = static_cast<int>(narrow / 2);
            for (const size_t way : {one.up, one.down}) {
                left_[way] = std::max(0.0, left_[way] - least);
                --users_[way];
            }
        }
        open_.resize(kept);
    }
}

}  // namespace ddl
