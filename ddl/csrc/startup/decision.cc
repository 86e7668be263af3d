#include "startup/decision.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/status.h"
#include "transport/host_memory.h"

namespace ddl {
namespace {

constexpr double kSearchSeconds = 30;  // for which the others wait while rank 0 thinks; it takes seconds at most

std::string format(const char* pattern, double value) {
    char text[64];
    std::snprintf(text, sizeof text, pattern, value);
    return text;
}

std::string name(const Bootstrap& bootstrap, const Placement& placement, int host) {
    for (int rank = 0; rank < bootstrap.size(); ++rank) {
        if (placement.host_of[static_cast<size_t>(rank)] == host) return bootstrap.host(rank);
    }
    return "";
}

void describe(const Bootstrap& bootstrap, const Placement& placement, const Probe& seen, const Tiers& tiers, int level,
              const std::function<void(const std::string&)>& say) {
    const auto host = [&](int number) { return name(bootstrap, placement, number); };
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

// Lists of numbers and of letters, each after its length.
class Writer {
  public:
    template <typename List>
    void put(const List& list) {
        const uint64_t length = list.size();
        add(&length, sizeof length);
        add(list.data(), length * sizeof list[0]);
    }
    std::vector<std::byte> data;

  private:
    void add(const void* from, size_t bytes) {
        const auto* first = static_cast<const std::byte*>(from);
        data.insert(data.end(), first, first + bytes);
    }
};

class Reader {
  public:
    explicit Reader(const std::vector<std::byte>& data) : at_(data.data()), end_(at_ + data.size()) {}

    template <typename List>
    List take() {
        uint64_t length = 0;
        copy(&length, 1, sizeof length);
        List list;
        // Checked before memory is taken: it may be no length.
        if (static_cast<size_t>(end_ - at_) / sizeof list[0] < length) too_short();
        list.resize(length);
        copy(list.data(), length, sizeof list[0]);
        return list;
    }
    // As many as there are.
    template <typename List>
    List take(size_t length) {
        List list = take<List>();
        if (list.size() != length) too_short();
        return list;
    }

  private:
    [[noreturn]] static void too_short() {
        throw Error(DDL_ERROR_INTERNAL, "the decision that rank 0 sent is too short, or none");
    }
    void copy(void* to, size_t count, size_t each) {
        if (static_cast<size_t>(end_ - at_) / each < count) too_short();
        if (count > 0) std::memcpy(to, at_, count * each);
        at_ += count * each;
    }

    const std::byte *at_, *end_;
};

using Integers = std::vector<int>;
using Doubles = std::vector<double>;

// The longest message that goes through every host's memory.
uint64_t local_message_of(const Placement& placement) {
    int most = 0;
    for (int rank = 0; rank < static_cast<int>(placement.host_of.size()); ++rank) {
        most = std::max(most, placement.local_size(rank));
    }
    return longest_riding(pipe_bytes_for(static_cast<size_t>(most)));
}

}  // namespace

std::vector<std::byte> pack(const Decision& decision) {
    const auto& [plan, links] = decision;
    Integers sizes;
    for (const auto& rack : links.tiers.racks) sizes.push_back(static_cast<int>(rack.size()));
    Writer writer;
    writer.put(Integers{plan.chunks, static_cast<int>(plan.message_bytes), static_cast<int>(plan.small_bytes),
                        static_cast<int>(links.local_message)});
    writer.put(plan.halved_above);
    writer.put(plan.dimensions);
    writer.put(plan.ranks);
    writer.put(plan.modes);
    writer.put(plan.reason);
    writer.put(
        Doubles{links.tiers.link, links.tiers.near, links.tiers.far, links.local_bandwidth, links.local_latency});
    writer.put(links.tiers.uplinks);
    writer.put(sizes);
    for (const auto& rack : links.tiers.racks) writer.put(rack);
    return std::move(writer.data);
}

Decision unpack(const std::vector<std::byte>& data) {
    Reader reader(data);
    const auto head = reader.take<Integers>(4);
    auto halved_above = reader.take<std::vector<uint64_t>>();
    const auto dimensions = reader.take<Integers>();
    auto ranks = reader.take<Integers>();
    const auto modes = reader.take<std::string>();
    auto reason = reader.take<std::string>();
    const auto size = static_cast<int>(ranks.size());
    Decision decision{make_plan(size, dimensions, modes, std::move(ranks), std::move(reason)), {}};
    decision.plan.chunks = head[0];
    decision.plan.message_bytes = static_cast<uint64_t>(head[1]);
    decision.plan.small_bytes = static_cast<uint64_t>(head[2]);
    decision.plan.halved_above = std::move(halved_above);
    Links& links = decision.links;
    links.local_message = static_cast<uint64_t>(head[3]);
    const auto measured = reader.take<Doubles>(5);
    links.tiers.link = measured[0];
    links.tiers.near = measured[1];
    links.tiers.far = measured[2];
    links.local_bandwidth = measured[3];
    links.local_latency = measured[4];
    links.tiers.uplinks = reader.take<Doubles>();
    for (const int count : reader.take<Integers>()) {
        links.tiers.racks.push_back(reader.take<Integers>(static_cast<size_t>(count)));
    }
    return decision;
}

Decision decide(Bootstrap& bootstrap, const Options& options, const Placement& placement, Tag tag,
                const std::function<void(const std::string&)>& say, const ProbeOptions& probe_options) {
    std::vector<std::byte> data;
    bootstrap.run([&] {
        const Probe seen = probe(bootstrap, placement, tag, probe_options);
        if (bootstrap.rank() == 0) {
            const Links links{find_tiers(seen.between), seen.local_bandwidth, seen.local_latency,
                              local_message_of(placement)};
            describe(bootstrap, placement, seen, links.tiers, options.dbg_level, say);
            data = pack({choose(options, placement, links), links});
        }
        bootstrap.broadcast(data, tag + kProbeTags, longest_probe(placement, probe_options) + kSearchSeconds);
    });
    return unpack(data);
}

}  // namespace ddl
