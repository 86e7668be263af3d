#include "decision.h"

#include <cstdio>

namespace ddl {
namespace {

constexpr double kSearchSeconds = 30;  // for which the others wait while rank 0 thinks; it takes seconds at most

std::string format(const char* pattern, double value) {
    char text[64];
    std::snprintf(text, sizeof text, pattern, value);
    return text;
}

std::string name(const Conversation& conversation, const Placement& placement, int host) {
    for (int rank = 0; rank < conversation.size(); ++rank) {
        if (placement.host_of[static_cast<size_t>(rank)] == host) return conversation.host(rank);
    }
    return "";
}

void describe(const Conversation& conversation, const Placement& placement, const Probe& seen, const Tiers& tiers,
              int level, const std::function<void(const std::string&)>& say) {
    const auto host = [&](int number) { return name(conversation, placement, number); };
    if (level < 1) return;
    say("links were measured in " + format("%.2f s", seen.seconds) + ": " + tiers.reason);
    for (size_t rack = 0; rack < tiers.racks.size() && tiers.racks.size() > 1; ++rack) {
        std::string line = "rack " + std::to_string(rack) + ":";
        for (const int one : tiers.racks[rack]) line += " " + host(one);
        say(line + format(", uplink %.1f Mbit/s", tiers.uplinks[rack] * 8e-6));
    }
    if (level < 2) return;
    say("within a host: " + format("%.3g MB/s, ", seen.local_bandwidth * 1e-6) +
        format("%.1f us; ", seen.local_latency * 1e6) + format("between hosts: %.1f us", tiers.near * 1e6) +
        (tiers.far > 0 ? format(", between racks: %.1f us", tiers.far * 1e6) : ""));
    for (size_t round = 0; round < seen.between.rounds.size(); ++round) {
        std::string line = "round " + std::to_string(round) + ":";
        for (const Flow& flow : seen.between.rounds[round]) {
            line += " " + host(flow.source) + ">" + host(flow.target) + format(" %.1f", flow.bandwidth * 8e-6);
        }
        say(line + " Mbit/s");
    }
}

}  // namespace

Plan decide(Conversation& conversation, const Options& options, const Placement& placement, Tag tag,
            const std::function<void(const std::string&)>& say, const ProbeOptions& probe_options) {
    std::vector<std::byte> data;
    conversation.run([&] {
        const Probe seen = probe(conversation, placement, tag, probe_options);
        if (conversation.rank() == 0) {
            const Links links{find_tiers(seen.between), seen.local_bandwidth, seen.local_latency};
            describe(conversation, placement, seen, links.tiers, options.dbg_level, say);
            data = pack(choose(options, placement, links));
        }
        conversation.broadcast(data, tag + kProbeTags, longest_probe(placement, probe_options) + kSearchSeconds);
    });
    return unpack(data);
}

}  // namespace ddl
