#include "tiers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "status.h"

namespace ddl {
namespace {

constexpr int kExtraRounds = 14;  // at least, beyond those in which every pair talks once ...
constexpr int kUsualRounds = 20;  // ... up to so many in all
// What a further rack must make likelier, in logarithms: the more hosts, the more partitions are tried, one of which
// explains noise by chance; and noise is not always normal.
constexpr double kHostPrice = 2, kFlowPrice = 0.05;
constexpr double kManyFlows = 170;    // what 8 hosts have: more would make it dear to search from many small racks
constexpr double kWide = 0.85;        // of what a rack's hosts can send: an uplink that carries more holds nobody up
constexpr double kLoose = 1.05;       // times what was seen over an uplink: one that held nobody up must not seem to
constexpr int kRefinements = 3;       // of the rates of uplinks
constexpr double kQuiet = 0.1;        // noise below which nothing is explained by racks: logarithms of ratios
constexpr double kFar = 0.3;          // a logarithm of a ratio beyond which it counts linearly: see misfit()
constexpr double kHopeless = 1.5;     // one beyond which slower flows count alike
constexpr double kFasterWeight = 3;   // of a flow that is faster than predicted
constexpr double kLinkShare = 0.75;   // of the flows within racks are taken for disturbed: the rest show a link's rate
constexpr double kUplinkShare = 0.7;  // likewise of those that an uplink holds up
constexpr int kExhaustive = 8;        // up to so many hosts every partition is tried: 4,140 of them
constexpr double kMostEffort = 3e8;   // steps of the innermost loops of a search: about two seconds
constexpr int kKicks = 30;            // that lead nowhere end a search
// Of the fastest flow: what is below is taken for one that an uplink held up. Several, as a start for each.
constexpr double kSlow[] = {0.5, 0.7, 0.85};
constexpr double kUnexplained = 0.3;  // of what one rack leaves: racks of many hosts that leave more are not believed
constexpr double kInfinite = std::numeric_limits<double>::infinity();

size_t index(int number) { return static_cast<size_t>(number); }

std::pair<int, int> sorted(int one, int other) { return {std::min(one, other), std::max(one, other)}; }

// Numbers whose sequence the standard fixes; its std::shuffle differs between libraries.
void shuffle(std::vector<int>& items, std::mt19937_64& random) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random() % i]);
}

// Every pair once in as few rounds as possible: one stands still, the others go round.
std::vector<Pairs> tournament(int hosts) {
    constexpr int kNobody = -1;
    std::vector<int> ring(index(hosts));
    std::iota(ring.begin(), ring.end(), 0);
    if (hosts % 2 == 1) ring.push_back(kNobody);
    std::vector<Pairs> rounds;
    for (size_t i = 0; i + 1 < ring.size(); ++i) {
        Pairs pairs;
        for (size_t at = 0; at < ring.size() / 2; ++at) {
            const int one = ring[at], other = ring[ring.size() - 1 - at];
            if (one != kNobody && other != kNobody) pairs.push_back(sorted(one, other));
        }
        std::sort(pairs.begin(), pairs.end());
        rounds.push_back(std::move(pairs));
        std::rotate(ring.begin() + 1, ring.end() - 1, ring.end());
    }
    return rounds;
}

// The value that a share of all are not above; reorders them.
double quantile(std::vector<double>& values, double share) {
    const double last = static_cast<double>(values.size() - 1);
    const auto at = values.begin() + std::lround(share * last);
    std::nth_element(values.begin(), at, values.end());
    return *at;
}

// What a flow costs that has `ratio` of the rate that was predicted. What disturbs a measurement makes flows slower: a
// rank that waits for its core, a lost packet. So one that is faster speaks louder, and one that is slower by far no
// louder than another. Squares of small deviations, lines of large ones: Huber's loss (Ann. Math. Statist. 35, 1964).
double misfit(double ratio) {
    const double deviation = std::log(ratio);
    const double x = deviation > 0 ? deviation : std::min(-deviation, kHopeless);
    return (deviation > 0 ? kFasterWeight : 1) * (x < kFar ? x * x : kFar * (2 * x - kFar));
}

// A partition: the rack of each host. Racks are numbered from 0 in the order of their first hosts.
struct Partition {
    std::vector<int> rack_of;
    int racks = 0;

    explicit Partition(std::vector<int> of) : rack_of(std::move(of)) {
        std::vector<int> numbers(rack_of.size() + 1, -1);
        for (int& rack : rack_of) {
            int& number = numbers[index(rack)];
            if (number < 0) number = racks++;
            rack = number;
        }
    }
    Racks groups() const {
        Racks found(index(racks));
        for (size_t host = 0; host < rack_of.size(); ++host) {
            found[index(rack_of[host])].push_back(static_cast<int>(host));
        }
        return found;
    }
};

// How far partitions explain a measurement. Keeps its working memory between them.
class Explanation {
  public:
    explicit Explanation(const Measurement& measured) : measured_(measured) {
        for (const auto& flows : measured.rounds) {
            flows_ += static_cast<double>(flows.size());
            for (const Flow& flow : flows) fastest_ = std::max(fastest_, flow.bandwidth);
        }
        price_of_rack_ = kHostPrice * std::min(measured.hosts, kExhaustive) + kFlowPrice * std::min(flows_, kManyFlows);
    }

    double link = 0;
    std::vector<double> uplinks;
    double effort = 0;  // so far

    // What is to be as low as possible: how unlikely the flows are, given the racks, where the noise is what they leave
    // unexplained; and a price for each further rack. Racks of one host each are none: they explain any rates of single
    // links.
    double price(const Partition& partition) {
        if (partition.racks == measured_.hosts && measured_.hosts > 1) return kInfinite;
        return flows_ * std::log(cost(partition) / flows_ + kQuiet * kQuiet) + price_of_rack_ * (partition.racks - 1);
    }

    // Whether `partition`, the last one that was priced, may be an answer.
    bool is_sound(const Partition& partition) const { return wide_racks(partition) <= 1; }

    // The sum over all flows of how far each is from what `partition` predicts; sets link and uplinks.
    double cost(const Partition& partition) {
        fit(partition);
        double total = 0;
        for (const auto& flows : measured_.rounds) {
            share(partition, flows);
            for (size_t i = 0; i < flows.size(); ++i) total += misfit(flows[i].bandwidth / rates_[i]);
        }
        return total;
    }

  private:
    // How many racks have an uplink that carries about all that their hosts can send: two of them are one.
    int wide_racks(const Partition& partition) const {
        std::vector<int> hosts(index(partition.racks));
        for (const int rack : partition.rack_of) ++hosts[index(rack)];
        int wide = 0;
        for (size_t rack = 0; rack < hosts.size(); ++rack) wide += uplinks[rack] > kWide * hosts[rack] * link;
        return wide;
    }

    // The rates of links and uplinks that explain the flows best, once the racks are given. A link's is the upper
    // quartile within racks. An uplink carries at least what was ever seen over it at once; from somewhat above that,
    // the flows that it holds up say by how much it was wrong.
    void fit(const Partition& partition) {
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

    // The rate of each flow of a round, and the rack whose uplink holds it up (-1: its own link). The narrowest uplink
    // is shared equally by its flows, then the next by those that are left.
    void share(const Partition& partition, const std::vector<Flow>& flows) {
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
                // What rounding leaves of a link must not become nothing, or less: logarithms are taken of rates.
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

    struct Open {
        size_t flow = 0, up = 0, down = 0;
    };
    const Measurement& measured_;
    double fastest_ = 0, flows_ = 0, price_of_rack_ = 0;
    std::vector<double> left_, rates_, values_;
    std::vector<int> users_, narrowest_;
    std::vector<Open> open_;
};

Partition one_rack(int hosts) { return Partition(std::vector<int>(index(hosts), 0)); }

Partition single_hosts(int hosts) {
    std::vector<int> rack_of(index(hosts));
    std::iota(rack_of.begin(), rack_of.end(), 0);
    return Partition(std::move(rack_of));
}

// Calls `visit` with every partition of the hosts: restricted growth strings.
void each_partition(int hosts, const std::function<void(const Partition&)>& visit) {
    std::vector<int> rack_of(index(hosts));
    const std::function<void(int, int)> place = [&](int host, int racks) {
        if (host == hosts) return visit(Partition(rack_of));
        for (int rack = 0; rack <= racks; ++rack) {
            rack_of[index(host)] = rack;
            place(host + 1, std::max(racks, rack + 1));
        }
    };
    place(0, 0);
}

// The slowest and the fastest flow between each two hosts that talked, as (hosts, lowest, highest).
struct Meeting {
    int one, other;
    double lowest, highest;
};
std::vector<Meeting> meetings(const Measurement& measured) {
    std::vector<Meeting> all;
    for (const auto& flows : measured.rounds) {
        for (const Flow& flow : flows) {
            const auto [one, other] = sorted(flow.source, flow.target);
            all.push_back({one, other, flow.bandwidth, flow.bandwidth});
        }
    }
    std::sort(all.begin(), all.end(),
              [](const Meeting& a, const Meeting& b) { return std::tie(a.one, a.other) < std::tie(b.one, b.other); });
    size_t kept = 0;
    for (const Meeting& meeting : all) {
        if (kept > 0 && all[kept - 1].one == meeting.one && all[kept - 1].other == meeting.other) {
            all[kept - 1].lowest = std::min(all[kept - 1].lowest, meeting.lowest);
            all[kept - 1].highest = std::max(all[kept - 1].highest, meeting.highest);
        } else {
            all[kept++] = meeting;
        }
    }
    all.resize(kept);
    return all;
}

double fastest_of(const std::vector<Meeting>& all) {
    double fastest = 0;
    for (const Meeting& meeting : all) fastest = std::max(fastest, meeting.highest);
    return fastest;
}

// A start: hosts are kept apart where a flow between them was slow, and put together greedily otherwise.
Partition kept_apart(int hosts, const std::vector<Meeting>& all, double limit) {
    std::vector<std::vector<bool>> slow(index(hosts), std::vector<bool>(index(hosts)));
    for (const Meeting& meeting : all) {
        if (meeting.lowest >= limit) continue;
        slow[index(meeting.one)][index(meeting.other)] = slow[index(meeting.other)][index(meeting.one)] = true;
    }
    Racks racks;
    std::vector<int> rack_of(index(hosts));
    for (int host = 0; host < hosts; ++host) {
        const auto fits = std::find_if(racks.begin(), racks.end(), [&](const std::vector<int>& rack) {
            return std::none_of(rack.begin(), rack.end(), [&](int one) { return slow[index(host)][index(one)]; });
        });
        rack_of[index(host)] = static_cast<int>(fits - racks.begin());
        if (fits == racks.end()) {
            racks.push_back({host});
        } else {
            fits->push_back(host);
        }
    }
    return Partition(std::move(rack_of));
}

// Another: hosts are put together where no flow between them was ever slow, and so are those that they share one with.
Partition put_together(int hosts, const std::vector<Meeting>& all, double limit) {
    std::vector<int> rack_of = single_hosts(hosts).rack_of;
    for (const Meeting& meeting : all) {
        if (meeting.lowest < limit) continue;
        const int from = rack_of[index(meeting.other)], to = rack_of[index(meeting.one)];
        std::replace(rack_of.begin(), rack_of.end(), from, to);
    }
    return Partition(std::move(rack_of));
}

// A search of partitions. What it finds depends on the measurement alone: no clock, and always the same random numbers.
class Search {
  public:
    explicit Search(const Measurement& measured)
        : hosts_(measured.hosts), explanation_(measured), random_(index(measured.hosts)) {
        if (hosts_ <= kExhaustive) {
            each_partition(hosts_, [&](const Partition& partition) { consider(partition); });
            return;
        }
        const auto met = meetings(measured);
        std::vector<Partition> starts{one_rack(hosts_)};
        for (const double share : kSlow) {
            starts.push_back(put_together(hosts_, met, share * fastest_of(met)));
            starts.push_back(kept_apart(hosts_, met, share * fastest_of(met)));
        }
        // The effort is shared out, so that a start that leads nowhere leaves the others theirs.
        double allowed = 0;
        for (const Partition& start : starts)
            descend(start, allowed += kMostEffort / 2 / static_cast<double>(starts.size()));
        // From the best of them again, with a part of it thrown over: it may be the end of a blind alley.
        for (int idle = 0; idle < kKicks && explanation_.effort < kMostEffort; ++idle) {
            if (descend(kicked(best_), kMostEffort)) idle = 0;
        }
    }

    const Partition& best() const { return best_; }
    bool complete() const { return hosts_ <= kExhaustive; }

  private:
    bool consider(const Partition& partition) {
        const double price = explanation_.price(partition);
        if (price >= price_ || !explanation_.is_sound(partition)) return false;
        price_ = price;
        best_ = partition;
        return true;
    }

    // Deals the hosts of two racks anew among both, or makes each host of a rack one of its own.
    Partition kicked(const Partition& from) {
        const auto draw = [&](int count) { return static_cast<int>(random_() % index(count)); };
        std::vector<int> rack_of = from.rack_of;
        const int one = draw(from.racks), other = draw(from.racks);
        int added = from.racks;
        for (int& rack : rack_of) {
            if (rack != one && rack != other) continue;
            rack = one == other ? added++ : draw(2) ? one : other;
            if (added > hosts_) added = hosts_;
        }
        return Partition(std::move(rack_of));
    }

    // Changes the partition as long as it gets better: joins two racks, or moves a host to another or a new one. True
    // where that led to the best so far.
    bool descend(Partition at, double allowed) {
        double price = explanation_.price(at);
        const auto take = [&](Partition next) {
            const double its = explanation_.price(next);
            if (its >= price) return false;
            price = its;
            at = std::move(next);
            return true;
        };
        for (bool better = true; better;) {
            better = false;
            for (int one = 0; one < at.racks; ++one) {
                for (int other = one + 1; other < at.racks; ++other) {
                    if (explanation_.effort > allowed) return consider(at);
                    std::vector<int> joined = at.rack_of;
                    std::replace(joined.begin(), joined.end(), other, one);
                    if (take(Partition(std::move(joined)))) {
                        better = true;
                        other = one;  // the numbers behind it have changed
                    }
                }
            }
            for (int host = 0; host < hosts_; ++host) {
                for (int rack = 0; rack <= at.racks; ++rack) {
                    if (rack == at.rack_of[index(host)]) continue;
                    if (explanation_.effort > allowed) return consider(at);
                    std::vector<int> moved = at.rack_of;
                    moved[index(host)] = rack;
                    better |= take(Partition(std::move(moved)));
                }
            }
        }
        return consider(at);
    }

    const int hosts_;
    Explanation explanation_;
    std::mt19937_64 random_;
    Partition best_{{}};
    double price_ = kInfinite;
};

Tiers answer(const Measurement& measured, const Partition& partition, std::string reason) {
    Tiers tiers;
    tiers.racks = partition.groups();
    tiers.reason = std::move(reason);
    Explanation explanation(measured);
    if (std::any_of(measured.rounds.begin(), measured.rounds.end(), [](const auto& flows) { return !flows.empty(); })) {
        explanation.cost(partition);
        tiers.link = explanation.link;
        if (partition.racks > 1) tiers.uplinks = explanation.uplinks;
    }
    for (const auto& flows : measured.rounds) {
        for (const Flow& flow : flows) {
            if (!(flow.latency > 0)) continue;
            const bool same = partition.rack_of[index(flow.source)] == partition.rack_of[index(flow.target)];
            double& least = same ? tiers.near : tiers.far;
            if (least == 0 || flow.latency < least) least = flow.latency;
        }
    }
    return tiers;
}

}  // namespace

std::vector<Pairs> probe_rounds(int hosts) {
    if (hosts < 2) return {};
    std::mt19937_64 random(static_cast<uint64_t>(hosts));
    std::vector<Pairs> rounds = tournament(hosts);
    constexpr size_t kFirst = kMostRounds - kExtraRounds;
    if (rounds.size() > kFirst) {
        std::vector<int> order(rounds.size());
        std::iota(order.begin(), order.end(), 0);
        shuffle(order, random);
        std::vector<Pairs> some;
        for (size_t i = 0; i < kFirst; ++i) some.push_back(rounds[index(order[i])]);
        rounds = std::move(some);
    }
    if (hosts <= 3) {  // there is only one pair at a time: each talks several times, so that a bad moment is outvoted
        const std::vector<Pairs> once = rounds;
        for (int again = 1; again < 2 * hosts - 1; ++again) rounds.insert(rounds.end(), once.begin(), once.end());
        return rounds;
    }
    std::vector<int> order(index(hosts));
    std::iota(order.begin(), order.end(), 0);
    const int extra = std::max(kExtraRounds, kUsualRounds - static_cast<int>(rounds.size()));
    for (int i = 0; i < extra; ++i) {
        shuffle(order, random);
        Pairs pairs;
        for (size_t at = 0; at + 1 < order.size(); at += 2) pairs.push_back(sorted(order[at], order[at + 1]));
        std::sort(pairs.begin(), pairs.end());
        rounds.push_back(std::move(pairs));
    }
    return rounds;
}

Tiers find_tiers(const Measurement& measured) {
    bool any = false;
    for (const auto& flows : measured.rounds) {
        for (const Flow& flow : flows) {
            any = true;
            if (flow.bandwidth > 0) continue;  // not a number fails this too
            throw Error(DDL_ERROR_ARGUMENT, "bandwidth from host " + std::to_string(flow.source) + " to " +
                                                std::to_string(flow.target) + ": " + std::to_string(flow.bandwidth) +
                                                "; expected above 0");
        }
    }
    const Partition flat = one_rack(measured.hosts);
    if (measured.hosts < 2) return answer(measured, flat, "no more than one host");
    if (!any) return answer(measured, flat, "nothing was measured");
    const Search search(measured);
    const Partition& best = search.best();
    std::string reason = "no uplink is slower than its hosts together: one tier";
    if (best.racks > 1) {
        Explanation explanation(measured);
        const double share = explanation.cost(best) / explanation.cost(flat);
        if (!search.complete() && share > kUnexplained) {
            return answer(measured, flat, "no racks that were tried explain the flows: taken for one tier");
        }
        reason = std::to_string(best.racks) + " racks leave " + std::to_string(std::lround(100 * share)) +
                 "% of what one rack leaves unexplained";
    }
    if (!search.complete()) reason += "; not every partition of so many hosts was tried";
    return answer(measured, best, std::move(reason));
}

}  // namespace ddl
