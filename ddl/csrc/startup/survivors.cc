#include "startup/survivors.h"

#include <algorithm>

#include "base/backoff.h"
#include "base/rank_list.h"
#include "base/status.h"
#include "startup/agreement.h"

namespace ddl {
namespace {

// For which a connection may be broken until heartbeats say why.
constexpr double kCauseSeconds = 1;
constexpr double kWaitSeconds = 5e-3;  // the longest, for messages; news of deaths come from elsewhere
// In which those that this rank waits for connect to it, if they are alive and call ddl_resize, too.
constexpr double kReachSeconds = 2;

class Words final : public Agreement::Links {
  public:
    Words(TcpTransport& transport, const SurvivorOptions& options) : transport_(transport), options_(options) {}

    int rank() const override { return transport_.rank(); }
    int size() const override { return transport_.size(); }
    void send(int peer, const std::vector<std::byte>& word) override { transport_.say(peer, word); }
    bool next(int* from, std::vector<std::byte>* word) override { return transport_.next_word(from, word); }
    Fate fate(int rank) const override {
        if (transport_.is_gone(rank)) return Fate::left;
        if (transport_.has_ended(rank)) return Fate::ended;
        switch (options_.death_of(rank)) {
            case Death::ended: return Fate::ended;
            case Death::silent: return Fate::silent;
            case Death::none: break;
        }
        return transport_.seconds_lost(rank) > kCauseSeconds ? Fate::silent : Fate::here;
    }
    std::vector<std::byte> offer() override {
        const std::string text = options_.offer();
        const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
        return {bytes, bytes + text.size()};
    }
    bool prepare(const std::vector<std::byte>& offer, uint64_t* ready) override {
        return options_.prepare({reinterpret_cast<const char*>(offer.data()), offer.size()}, ready);
    }

  private:
    TcpTransport& transport_;
    const SurvivorOptions& options_;
};

// Moves messages along until done() is true; awaited() are those who keep this rank waiting.
void await(TcpTransport& transport, const Patience& patience, const std::function<void(const std::string&)>& warn,
           const std::function<bool()>& done, const std::function<std::vector<int>()>& awaited) {
    const double start = seconds_now();
    bool warned = false;
    Backoff backoff(0, 1e-3);
    const auto pause = [&] {
        if (!transport.wait(kWaitSeconds)) backoff.pause();
    };
    for (; !done(); pause()) {
        transport.poll();
        const double waited = seconds_now() - start;
        // Whoever has no connection to this rank, and died, is found out by a connection that is refused; one that has
        // decided answers a new connection with the farewell.
        if (waited > kReachSeconds) transport.reach(awaited());
        const bool late = waited >= patience.timeout_seconds;
        if (!late && (warned || waited < patience.warn_seconds)) continue;
        warned = true;
        const std::string text = "rank " + std::to_string(transport.rank()) + " has waited " +
                                 std::to_string(static_cast<int>(waited)) + " s in ddl_resize or ddl_shrink for " +
                                 name_list(awaited()) + ": every rank that is alive must call one of them";
        if (late) throw Error(DDL_ERROR_TIMEOUT, text);
        warn(text);
    }
}

}  // namespace

Survivors agree_on_survivors(TcpTransport& transport, const SurvivorOptions& options) {
    Survivors result;
    try {
        Words words(transport, options);
        Agreement agreement(words);
        await(
            transport, options.patience, options.warn, [&] { return agreement.poll(); },
            [&] { return agreement.awaited(); });
        result.ranks = agreement.survivors();
        result.newcomers = agreement.newcomers();
        result.ballot = agreement.ballot();
        result.links = transport.end_epoch(result.ranks, agreement.farewell());
        for (size_t i = 0; i < result.ranks.size(); ++i) {
            TcpLinks::Link& its = result.links.ranks[i];
            if (its.connection || result.ranks[i] == words.rank()) continue;
            const Fate fate = words.fate(result.ranks[i]);
            its.is_lost |= fate != Fate::here;
            its.has_ended = its.is_lost && fate != Fate::silent;
        }
    } catch (...) {
        transport.close();
        throw;
    }
    transport.close();
    return result;
}

}  // namespace ddl
