#include "measure/probe.h"

#include <algorithm>
#include <set>

namespace ddl {
namespace {

constexpr int kPings = 6;
constexpr double kPingSeconds = 0.005;  // no ping is sent after this time

// Tags, counted from the first.
enum : Tag { kStream = 0, kPing = kStream + kStreamTags, kPong, kHello, kBarrier, kReport };
static_assert(kReport < kProbeTags);

// The time of a small message and its answer.
struct RoundTrip {
    double least = 0, mean = 0;  // seconds; the mean includes the time that ranks wait for their cores
    uint64_t last = 0;           // on the wire: this is the last one
};

// Measures it; both ends get the same result. The lower rank asks.
RoundTrip ping(Bootstrap& bootstrap, int peer, Tag tag) {
    RoundTrip found;
    if (bootstrap.rank() > peer) {
        while (found.last == 0) {
            bootstrap.hear(peer, tag + kPing, &found, sizeof found);
            bootstrap.say(peer, tag + kPong, nullptr, 0);
        }
        return found;
    }
    const double begin = seconds_now();
    for (int i = 1; found.last == 0; ++i) {
        const double at = seconds_now();
        // The last ping carries the result to the other end, and is not measured.
        found.last = i == kPings || (i > 1 && at - begin > kPingSeconds);
        bootstrap.say(peer, tag + kPing, &found, sizeof found);
        bootstrap.hear(peer, tag + kPong, nullptr, 0);
        if (found.last != 0) break;
        const double now = seconds_now(), took = std::max(now - at, 1e-9);
        found.least = i == 1 ? took : std::min(found.least, took);
        found.mean = std::max((now - begin) / i, 1e-9);
    }
    return found;
}

// A leader's report to rank 0, sent over the wire as it is.
struct Seen {
    double bandwidth = 0, latency = 0;
};

std::vector<int> ranks_on(const Placement& placement, int host) {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < placement.host_of.size(); ++rank) {
        if (placement.host_of[rank] == host) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
}

std::vector<int> leaders_of(const Placement& placement) {
    std::vector<int> leaders(static_cast<size_t>(placement.num_hosts), -1);
    for (size_t rank = 0; rank < placement.host_of.size(); ++rank) {
        int& leader = leaders[static_cast<size_t>(placement.host_of[rank])];
        if (leader < 0) leader = static_cast<int>(rank);
    }
    return leaders;
}

// The partner of `host` in a round; -1 if it has none.
int partner_of(const Pairs& pairs, int host) {
    for (const auto& [one, other] : pairs) {
        if (one == host) return other;
        if (other == host) return one;
    }
    return -1;
}

Seen meet(Bootstrap& bootstrap, int peer, Tag tag, const Box& box) {
    const RoundTrip found = ping(bootstrap, peer, tag);
    return {Stream(bootstrap, peer, tag + kStream, box, found.mean).run(), found.least / 2};
}

// Neighbours on a host exchange data, all at once, because in a collective they share the host's memory too.
Seen measure_inside(Bootstrap& bootstrap, const Placement& placement, Tag tag, const Box& box) {
    const std::vector<int> mine = ranks_on(placement, placement.host_of[static_cast<size_t>(bootstrap.rank())]);
    const auto at = static_cast<size_t>(std::find(mine.begin(), mine.end(), bootstrap.rank()) - mine.begin());
    if ((at ^ 1) >= mine.size()) return {};
    return meet(bootstrap, mine[at ^ 1], tag, box);
}

// Opens all connections that will be used, so that no round has to wait for one.
void greet(Bootstrap& bootstrap, const std::vector<int>& peers, Tag tag) {
    std::vector<Ticket> open;
    for (const int peer : peers) {
        open.push_back(bootstrap.receive(peer, tag, nullptr, 0));
        open.push_back(bootstrap.send(peer, tag, nullptr, 0));
    }
    for (size_t i = 0; i < open.size(); ++i) {
        bootstrap.await(peers[i / 2], [&] { return bootstrap.finished(open[i]); });
    }
}

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

Probe probe(Bootstrap& bootstrap, const Placement& placement, Tag tag, const ProbeOptions& options) {
    Probe found;
    const double begin = seconds_now();
    const Seen inside = measure_inside(bootstrap, placement, tag, options.inside);
    const std::vector<int> leaders = leaders_of(placement);
    const int host = placement.host_of[static_cast<size_t>(bootstrap.rank())];
    if (leaders[static_cast<size_t>(host)] != bootstrap.rank()) return found;

    const std::vector<Pairs> rounds = probe_rounds(placement.num_hosts);
    std::set<int> partners;
    for (const Pairs& pairs : rounds) {
        if (const int other = partner_of(pairs, host); other >= 0) partners.insert(leaders[static_cast<size_t>(other)]);
    }
    greet(bootstrap, {partners.begin(), partners.end()}, tag + kHello);
    std::vector<Seen> report{inside};
    for (const Pairs& pairs : rounds) {
        bootstrap.barrier(leaders, tag + kBarrier);
        Seen& seen = report.emplace_back();
        const int other = partner_of(pairs, host);
        if (other < 0) continue;
        seen = meet(bootstrap, leaders[static_cast<size_t>(other)], tag, options.between);
    }
    if (bootstrap.rank() != 0) {
        bootstrap.say(0, tag + kReport, report.data(), report.size() * sizeof(Seen));
        return found;
    }
    found.between.hosts = placement.num_hosts;
    found.between.rounds.resize(rounds.size());
    std::vector<double> bandwidths, latencies;
    for (int one = 0; one < placement.num_hosts; ++one) {
        const int leader = leaders[static_cast<size_t>(one)];
        if (leader != 0) bootstrap.hear(leader, tag + kReport, report.data(), report.size() * sizeof(Seen));
        if (report[0].bandwidth > 0) {
            bandwidths.push_back(report[0].bandwidth);
            latencies.push_back(report[0].latency);
        }
        for (size_t round = 0; round < rounds.size(); ++round) {
            const int other = partner_of(rounds[round], one);
            const Seen& seen = report[round + 1];
            if (other >= 0) found.between.rounds[round].push_back({other, one, seen.bandwidth, seen.latency});
        }
    }
    found.local_bandwidth = median(std::move(bandwidths));
    found.local_latency = median(std::move(latencies));
    found.seconds = seconds_now() - begin;
    return found;
}

double longest_probe(const Placement& placement, const ProbeOptions& options) {
    const auto rounds = static_cast<double>(probe_rounds(placement.num_hosts).size());
    // The end of a round waits for data in flight, and ranks that share cores are slow to take turns.
    constexpr double kSlack = 5;
    return kSlack + 2 * (rounds * (options.between.warm_seconds + options.between.count_seconds) +
                         options.inside.warm_seconds + options.inside.count_seconds);
}

}  // namespace ddl
