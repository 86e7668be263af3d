// The measurement and the decision over the in-process network, with faults: no rank hangs, all decide alike.
#include <mutex>

#include "base/status.h"
#include "check.h"
#include "startup/decision.h"
#include "talk.h"

using namespace ddl;

namespace {

// Shorter than on a network, which needs time to find its rate.
ProbeOptions quick() {
    ProbeOptions options;
    options.between = {0.001, 0.003, 0.002, 1 << 20};
    options.inside = options.between;
    return options;
}

struct Outcome {
    std::vector<Status> ends;
    std::vector<Plan> plans;
    std::vector<Links> links;
    std::string said;
};

Outcome decide_all(LocalNetwork& network, const std::vector<std::string>& hosts, const std::string& options,
                   Patience patience = {30, 60, 100}) {
    BootstrapOptions talking = talk_options(hosts);
    talking.patience = patience;
    const Placement placement = place(hosts);
    const Options asked = parse_options(options);
    Outcome outcome;
    outcome.plans.resize(hosts.size());
    outcome.links.resize(hosts.size());
    outcome.ends = talk(
        network,
        [&](Bootstrap& bootstrap) {
            const auto rank = static_cast<size_t>(bootstrap.rank());
            const auto say = [&](const std::string& text) {
                CHECK_EQ(rank, size_t{0});
                outcome.said += text + "\n";
            };
            const Decision decision = decide(bootstrap, asked, placement, 0, say, quick());
            outcome.plans[rank] = decision.plan;
            outcome.links[rank] = decision.links;
        },
        talking);
    return outcome;
}

}  // namespace

TEST("a decision survives the wire, and a part of one is refused") {
    Decision decision{make_plan(6, {2, 3}, "rr", {5, 4, 3, 2, 1, 0}, "because"),
                      {{{{0, 2}, {1}}, 25e6, {12e6, 25e6}, 1e-4, 2e-4, ""}, 2e9, 5e-6}};
    decision.plan.chunks = 9;
    decision.plan.message_bytes = 70000;
    decision.plan.small_bytes = 4096;
    decision.plan.halved_above = {256, 1024};
    const auto data = pack(decision);
    const Decision read = unpack(data);
    CHECK(read.plan.dimensions == decision.plan.dimensions);
    CHECK(read.plan.ranks == decision.plan.ranks);
    CHECK(read.plan.positions == decision.plan.positions);
    CHECK_EQ(read.plan.modes, decision.plan.modes);
    CHECK_EQ(read.plan.reason, decision.plan.reason);
    CHECK_EQ(read.plan.chunks, 9);
    CHECK_EQ(read.plan.message_bytes, uint64_t{70000});
    CHECK_EQ(read.plan.small_bytes, uint64_t{4096});
    CHECK(read.plan.halved_above == decision.plan.halved_above);
    CHECK(read.links.tiers.racks == decision.links.tiers.racks);
    CHECK(read.links.tiers.uplinks == decision.links.tiers.uplinks);
    CHECK_EQ(read.links.tiers.link, 25e6);
    CHECK_EQ(read.links.tiers.near, 1e-4);
    CHECK_EQ(read.links.tiers.far, 2e-4);
    CHECK_EQ(read.links.local_bandwidth, 2e9);
    CHECK_EQ(read.links.local_latency, 5e-6);
    for (size_t length = 0; length < data.size(); ++length) {
        const std::vector<std::byte> part(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(length));
        CHECK_CONTAINS(check::message_of<Error>([&] { unpack(part); }), "too short");
    }
}

TEST("every rank gets the plan that rank 0 chose and the links that it knows, and nothing is left in the network") {
    const std::vector<std::vector<std::string>> jobs{{"a", "b"},
                                                     {"a", "b", "a", "b"},
                                                     {"a", "b", "c"},
                                                     {"a", "a", "a", "b", "b", "c"},
                                                     {"a", "b", "c", "d", "d", "c"}};
    for (const auto& hosts : jobs) {
        LocalNetwork network(static_cast<int>(hosts.size()));
        const Outcome outcome = decide_all(network, hosts, "-mode p -dbg_level 2");
        for (const Status& end : outcome.ends) CHECK_EQ(end.message, std::string());
        for (const Plan& plan : outcome.plans) {
            CHECK_EQ(format_mode(plan), format_mode(outcome.plans[0]));
            CHECK(plan.ranks == outcome.plans[0].ranks);
            CHECK_EQ(plan.reason, outcome.plans[0].reason);
            CHECK_CONTAINS(plan.reason, "links ");
        }
        for (const Links& links : outcome.links) {
            CHECK(links.tiers.link > 0);
            CHECK(pack({outcome.plans[0], links}) == pack({outcome.plans[0], outcome.links[0]}));
        }
        CHECK_EQ(network.pending(), size_t{0});
        CHECK_CONTAINS(outcome.said, "links were measured in ");
        CHECK_CONTAINS(outcome.said, "round 0: ");
    }
}

TEST("dimensions that are asked for stay, whatever was measured") {
    const std::vector<std::string> hosts{"a", "b", "a", "b"};
    LocalNetwork network(4);
    const Outcome outcome = decide_all(network, hosts, "-mode p:2x2x1");
    CHECK_EQ(format_mode(outcome.plans[3]), "r:2x2");
    CHECK(outcome.plans[3].ranks == std::vector<int>({0, 2, 1, 3}));
    CHECK_EQ(outcome.said, std::string());
}

TEST("latency is measured") {
    LocalNetwork network(2);
    network.delay(0, 0.01);
    network.delay(1, 0.01);
    const Placement placement = place({"a", "b"});
    talk(network, [&](Bootstrap& bootstrap) {
        const Probe found = probe(bootstrap, placement, 0, quick());
        if (bootstrap.rank() != 0) return;
        CHECK_EQ(found.between.rounds.size(), probe_rounds(2).size());
        for (const auto& flows : found.between.rounds) {
            CHECK_EQ(flows.size(), size_t{2});
            for (const Flow& flow : flows) {
                CHECK(flow.bandwidth > 0);
                CHECK(flow.latency >= 0.01 && flow.latency < 1);
            }
        }
        CHECK_EQ(found.local_bandwidth, 0.0);
    });
}

TEST("a rank that dies while links are measured is named by all, at once") {
    const std::vector<std::string> hosts{"a", "a", "b", "b", "c", "c", "d", "d"};
    for (const int victim : {0, 1, 2, 7}) {
        for (const int messages : {0, 1, 10, 60}) {
            LocalNetwork network(8);
            network.kill_after(victim, messages);
            const double begin = seconds_now();
            const Outcome outcome = decide_all(network, hosts, "-mode p");
            CHECK(seconds_now() - begin < 10);
            const bool survived = outcome.ends[static_cast<size_t>(victim)].ok();  // it had no more to say
            for (const Status& end : outcome.ends) {
                if (survived) continue;
                CHECK_EQ(end.code, DDL_ERROR_PEER_LOST);
                CHECK_CONTAINS(end.message, "the test: rank " + std::to_string(victim) + " (host ");
                CHECK_CONTAINS(end.message, " died");
            }
        }
    }
}

TEST("a host that goes silent while links are measured is found by the timeout, and all end") {
    const std::vector<std::string> hosts{"a", "a", "b", "c", "d"};
    LocalNetwork network(5);
    network.silence(3);
    const double begin = seconds_now();
    const Outcome outcome = decide_all(network, hosts, "-mode p", {1, 0.2, 0.5});
    CHECK(seconds_now() - begin < 120);
    for (const Status& end : outcome.ends) CHECK_EQ(end.code, DDL_ERROR_TIMEOUT);
    // Those that it was to greet first name it; the others are told.
    for (const int rank : {0, 1, 2, 4}) {
        CHECK_CONTAINS(outcome.ends[static_cast<size_t>(rank)].message, "rank 3 (host c)");
    }
}
