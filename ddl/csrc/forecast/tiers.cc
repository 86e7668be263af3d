#include "forecast/tiers.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <tuple>

#include "base/status.h"
#include "forecast/explanation.h"

namespace ddl {
namespace {

constexpr double kMostEffort = 3e8;  // steps of the innermost loops of a search: about two seconds
constexpr int kKicks = 30;           // so many kicks without success end a search
// Shares of the fastest flow: a slower flow is taken as limited by an uplink. Each value gives a start of the search.
constexpr double kSlow[] = {0.5, 0.7, 0.85};
constexpr double kUnexplained =
    0.3;  // of what one rack leaves unexplained: racks of many hosts that leave more are rejected

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

// The slowest and the fastest flow between two hosts that exchanged data.
struct Meeting {
    int one, other;
    double lowest, highest;
};
std::vector<Meeting> meetings(const Measurement& measured) {
    std::vector<Meeting> all;
    for (const auto& flows : measured.rounds) {
        for (const Flow& flow : flows) {
            const auto [one, other] = std::minmax(flow.source, flow.target);
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

// A start of the search: hosts with a slow flow between them stay apart; others are put together greedily.
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

// Another start: hosts without a slow flow between them are put together, transitively.
Partition put_together(int hosts, const std::vector<Meeting>& all, double limit) {
    std::vector<int> rack_of = single_hosts(hosts).rack_of;
    for (const Meeting& meeting : all) {
        if (meeting.lowest < limit) continue;
        const int from = rack_of[index(meeting.other)], to = rack_of[index(meeting.one)];
        std::replace(rack_of.begin(), rack_of.end(), from, to);
    }
    return Partition(std::move(rack_of));
}

// A search of partitions. The result depends on the measurement alone: there is no clock, and the random numbers are
// always the same.
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
        // The effort is divided among the starts, so that a bad start does not use it all.
        double allowed = 0;
        for (const Partition& start : starts)
            descend(start, allowed += kMostEffort / 2 / static_cast<double>(starts.size()));
        // Then continue from the best partition with a random change: it may be a local optimum.
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

    // Deals the hosts of two racks anew, or splits a rack into single hosts.
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

    // Improves the partition as long as it gets better: joins two racks, or moves a host to another or a new rack. True
    // if the result is the best so far.
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
            return answer(measured, flat, "no racks explain the flows: taken as one tier");
        }
        reason = std::to_string(best.racks) + " racks leave " + std::to_string(std::lround(100 * share)) +
                 "% of what one rack leaves unexplained";
    }
    if (!search.complete()) reason += "; not every partition of so many hosts was tried";
    return answer(measured, best, std::move(reason));
}

}  // namespace ddl
