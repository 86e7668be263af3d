// Topologies are drawn, measured by the planned rounds with noise, and must be found again.
#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "base/status.h"
#include "check.h"
#include "forecast/tiers.h"
#include "measure/rounds.h"

using namespace ddl;

namespace {

constexpr double kLink = 25e6;  // bytes a second: 200 Mbit/s

// Racks of hosts in the order in which they are listed, and what each rack's uplink carries each way.
struct Topology {
    Racks racks;
    std::vector<double> uplinks;

    int hosts() const {
        int count = 0;
        for (const auto& rack : racks) count += static_cast<int>(rack.size());
        return count;
    }
    int rack_of(int host) const {
        for (size_t at = 0; at < racks.size(); ++at) {
            if (std::count(racks[at].begin(), racks[at].end(), host) > 0) return static_cast<int>(at);
        }
        return -1;
    }
};

using Random = std::mt19937_64;
double uniform(Random& random, double low, double high) { return std::uniform_real_distribution<>(low, high)(random); }
int between(Random& random, int low, int high) { return std::uniform_int_distribution<>(low, high)(random); }

// Racks of these sizes, their hosts dealt at random; an uplink carries `low` to `high` of what its hosts send together.
Topology deal(Random& random, const std::vector<int>& sizes, double low = 0.1, double high = 0.5) {
    std::vector<int> order(static_cast<size_t>(std::accumulate(sizes.begin(), sizes.end(), 0)));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    Topology made;
    auto from = order.begin();
    for (const int size : sizes) {
        made.racks.emplace_back(from, from + size);
        std::sort(made.racks.back().begin(), made.racks.back().end());
        from += size;
    }
    std::sort(made.racks.begin(), made.racks.end());
    for (const auto& rack : made.racks) {
        made.uplinks.push_back(uniform(random, low, high) * static_cast<double>(rack.size()) * kLink);
    }
    return made;
}

// 2 to `most` hosts in 1 to 3 racks, one of them with more than one host: others look like slower links.
Topology draw(Random& random, int most = 8) {
    for (;;) {
        std::vector<int> sizes(static_cast<size_t>(between(random, 1, 3)));
        for (int& size : sizes) size = between(random, 1, most - 1);
        const int hosts = std::accumulate(sizes.begin(), sizes.end(), 0);
        if (hosts >= 2 && hosts <= most && *std::max_element(sizes.begin(), sizes.end()) > 1) {
            return deal(random, sizes);
        }
    }
}

// The rates of flows in flight together: all grow alike, and each stops where a link that it crosses is full.
std::vector<double> carried(const Topology& topology, const std::vector<std::pair<int, int>>& flows) {
    using Link = std::tuple<bool, bool, int>;  // of a rack, upwards, number
    std::map<Link, double> capacity;
    std::vector<std::set<Link>> crossed;
    for (const auto& [source, target] : flows) {
        std::set<Link> links{{false, true, source}, {false, false, target}};
        for (const Link& link : links) capacity[link] = kLink;
        const int from = topology.rack_of(source), to = topology.rack_of(target);
        if (from != to) {
            for (const Link& link : {Link{true, true, from}, Link{true, false, to}}) {
                links.insert(link);
                capacity[link] = topology.uplinks[static_cast<size_t>(std::get<2>(link))];
            }
        }
        crossed.push_back(std::move(links));
    }
    std::vector<double> rates(flows.size());
    std::set<size_t> growing;
    for (size_t at = 0; at < flows.size(); ++at) growing.insert(at);
    while (!growing.empty()) {
        std::map<Link, double> room;
        for (const auto& [link, most] : capacity) {
            double used = 0;
            int users = 0;
            for (size_t at = 0; at < flows.size(); ++at) {
                if (crossed[at].count(link) == 0) continue;
                used += rates[at];
                users += static_cast<int>(growing.count(at));
            }
            if (users > 0) room[link] = (most - used) / users;
        }
        const double step = std::min_element(room.begin(), room.end(), [](const auto& a, const auto& b) {
                                return a.second < b.second;
                            })->second;
        for (const size_t at : growing) rates[at] += step;
        for (const auto& [link, left] : room) {
            if (left > step * (1 + 1e-9)) continue;
            for (size_t at = 0; at < flows.size(); ++at) {
                if (crossed[at].count(link) > 0) growing.erase(at);
            }
        }
    }
    return rates;
}

// What the planned rounds see on the topology, each figure wrong by up to `noise`, and `stalls` of them (a share) by a
// factor of five: a lost packet.
Measurement measured(const Topology& topology, Random& random, double noise = 0.1, double stalls = 0) {
    Measurement found{topology.hosts(), {}};
    for (const Pairs& pairs : probe_rounds(topology.hosts())) {
        std::vector<std::pair<int, int>> ways;
        for (const auto& [one, other] : pairs) {
            ways.emplace_back(one, other);
            ways.emplace_back(other, one);
        }
        const auto rates = carried(topology, ways);
        std::vector<Flow> flows;
        for (size_t at = 0; at < ways.size(); ++at) {
            double rate = rates[at] * uniform(random, 1 - noise, 1 + noise);
            if (uniform(random, 0, 1) < stalls) rate /= 5;
            flows.push_back({ways[at].first, ways[at].second, rate, 50e-6});
        }
        found.rounds.push_back(std::move(flows));
    }
    return found;
}

std::string text(const Racks& racks) {
    std::string all;
    for (const auto& rack : racks) {
        for (const int host : rack) all += std::to_string(host) + " ";
        all += "| ";
    }
    return all;
}

// Noise makes about one topology in a thousand look like another: more than three of sixty miss in one run of millions.
constexpr int kMayMiss = 3;

bool is_found(const Topology& topology, Random& random, double noise = 0.1, double stalls = 0) {
    return text(find_tiers(measured(topology, random, noise, stalls)).racks) == text(topology.racks);
}

bool near(double a, double b, double relative) { return std::fabs(a - b) <= relative * b; }

}  // namespace

TEST("the tests' network shares as it should") {
    const Topology two{{{0, 1}, {2, 3}}, {kLink, kLink}};
    CHECK(carried(two, {{0, 2}}) == std::vector<double>{kLink});  // a single pair sees no uplink
    CHECK(carried(two, {{0, 2}, {1, 3}}) == std::vector<double>(2, kLink / 2));
    CHECK(carried(two, {{0, 1}, {2, 3}}) == std::vector<double>(2, kLink));
}

TEST("the racks of a topology are found in any order under noise") {
    Random random(check::seed());
    const std::vector<Topology> known{{{{0, 3, 5, 6}, {1, 2, 4, 7}}, {2 * kLink, 2 * kLink}},
                                      {{{0, 7}, {1, 6}, {2, 3, 4, 5}}, {kLink, kLink, 2 * kLink}},
                                      {{{0, 1, 2, 3, 4, 5, 6}, {7}}, {3.5 * kLink, 0.5 * kLink}}};
    std::vector<Topology> all = known;
    for (int i = 0; i < (check::kSanitized ? 10 : 60); ++i) all.push_back(draw(random));
    int missed = 0;
    for (const Topology& topology : all) missed += !is_found(topology, random);
    CHECK(missed <= kMayMiss);
}

TEST("lost packets in one flow of thirty do not hide the racks") {
    Random random(check::seed());
    int missed = 0;
    for (int i = 0; i < (check::kSanitized ? 5 : 40); ++i) {
        Topology topology = draw(random);
        while (topology.hosts() < 4) topology = draw(random);  // below, there are only three flows a pair
        missed += !is_found(topology, random, 0.15, 0.03);
    }
    CHECK(missed <= kMayMiss);
}

TEST("hosts on one switch are one rack, and so are racks whose uplinks carry all") {
    Random random(check::seed());
    for (int hosts = 2; hosts <= 8; ++hosts) {
        std::vector<int> sizes{hosts};
        for (const bool uplinks : {false, true}) {
            if (uplinks && hosts < 4) continue;
            if (uplinks) sizes = {hosts / 2, hosts - hosts / 2};
            const Tiers found = find_tiers(measured(deal(random, sizes, 1, 1), random));
            CHECK_EQ(found.racks.size(), size_t{1});
            CHECK(found.uplinks.empty());
            CHECK(near(found.link, kLink, 0.1));
            CHECK_CONTAINS(found.reason, "no uplink is slower than its hosts together");
        }
    }
}

TEST("racks of one host each look like one rack of slower links") {
    Random random(check::seed());
    for (const int hosts : {2, 3}) {
        const Topology lonely = deal(random, std::vector<int>(static_cast<size_t>(hosts), 1), 0.5, 0.5);
        const Tiers found = find_tiers(measured(lonely, random));
        CHECK_EQ(found.racks.size(), size_t{1});
        CHECK(near(found.link, kLink / 2, 0.1));
    }
}

TEST("links, uplinks and latencies are measured with the racks") {
    Random random(check::seed());
    const Topology topology{{{0, 2}, {1, 3}}, {kLink / 2, kLink / 4}};
    Measurement seen = measured(topology, random, 0.02);
    for (auto& flows : seen.rounds) {
        for (Flow& flow : flows) flow.latency = topology.rack_of(flow.source) == topology.rack_of(flow.target) ? 5 : 7;
    }
    const Tiers found = find_tiers(seen);
    CHECK_EQ(text(found.racks), text(topology.racks));
    CHECK_EQ(found.uplinks.size(), size_t{2});
    // Racks of two: what one sends the other receives, so that the narrower uplink is all that is seen of both.
    for (const double uplink : found.uplinks) CHECK(near(uplink, kLink / 4, 0.1));
    CHECK(near(found.link, kLink, 0.05));
    CHECK_EQ(found.near, 5.0);
    CHECK_EQ(found.far, 7.0);
    CHECK_CONTAINS(found.reason, "2 racks leave ");
}

TEST("pairs that are measured alone count too") {
    Measurement alone{4, {}};
    for (int one = 0; one < 4; ++one) {
        for (int other = one + 1; other < 4; ++other) {
            const double rate = one % 2 == other % 2 ? kLink : kLink / 4;
            alone.rounds.push_back({{one, other, rate, 0}, {other, one, rate, 0}});
        }
    }
    CHECK_EQ(text(find_tiers(alone).racks), text({{0, 2}, {1, 3}}));
}

TEST("a bandwidth that is not above 0 is refused with its hosts") {
    for (const double rate : {0.0, -1.0, std::nan("")}) {
        const std::string message = check::message_of<Error>([&] { find_tiers({2, {{{0, 1, rate, 0}}}}); });
        CHECK_CONTAINS(message, "bandwidth from host 0 to 1: ");
        CHECK_CONTAINS(message, "expected above 0");
    }
}

TEST("one host is one rack, and so are hosts that were not measured") {
    CHECK_EQ(text(find_tiers({1, {}}).racks), text({{0}}));
    CHECK_EQ(text(find_tiers({3, {}}).racks), text({{0, 1, 2}}));
    CHECK_EQ(find_tiers({3, {}}).reason, std::string("nothing was measured"));
}

TEST("the racks of more hosts are found nearly, and the search of any number ends") {
    Random random(7);  // the same ones each time, as the search may miss some
    std::vector<std::vector<int>> all{{5, 4, 3},    {8, 8},           {4, 4, 4, 4},
                                      {8, 8, 8, 8}, {16, 16, 16, 16}, {50, 50, 50, 50}};
    if (check::kSanitized) all.resize(1);
    for (const auto& sizes : all) {
        const Topology topology = deal(random, sizes, 0.2, 0.5);
        const Measurement seen = measured(topology, random);
        const std::clock_t begin = std::clock();  // of the processor: others may use the machine
        const Tiers found = find_tiers(seen);
        const double took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
        if (!check::kSanitized) CHECK(took < 10);  // 2 are usual
        const Topology answer{found.racks, found.uplinks};
        int right = 0;  // pairs of hosts of which the answer says rightly whether they share a rack
        for (int one = 0; one < seen.hosts; ++one) {
            for (int other = 0; other < one; ++other) {
                right += (answer.rack_of(one) == answer.rack_of(other)) ==
                         (topology.rack_of(one) == topology.rack_of(other));
            }
        }
        const double share = right / (0.5 * seen.hosts * (seen.hosts - 1));
        if (std::getenv("DDL_PRINT")) {
            std::printf("%d hosts: %.1f s, %.0f%% of pairs right: %s\n", seen.hosts, took, 100 * share,
                        found.reason.c_str());
        }
        if (seen.hosts <= 64) CHECK(share > 0.75);
        CHECK(found.racks.size() == 1 ||
              check::contains(found.reason, "not every partition of so many hosts was tried"));
    }
}
