#include "startup/survivors.h"

#include <algorithm>

#include "base/backoff.h"
#include "base/rank_list.h"
#include "base/status.h"
#include "startup/agreement.h"

namespace ddl {
namespace {

// For which a connection may be broken, or not be had, until heartbeats say why.
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
    // Heartbeats have found a rank silent: the network may be cut.
    bool is_cut() const {
        const std::vector<int> ranks = others();
        return std::any_of(ranks.begin(), ranks.end(),
                           [&](int its) { return options_.death_of(its) == Death::silent; });
    }
    std::vector<int> others() const {
        std::vector<int> ranks;
        for (int other = 0; other < size(); ++other) {
            if (other != rank()) ranks.push_back(other);
        }
        return ranks;
    }
    bool prepare(const std::vector<std::byte>& offer, uint64_t* ready) override {
        return options_.prepare({reinterpret_cast<const char*>(offer.data()), offer.size()}, ready);
    }

  private:
    TcpTransport& transport_;
    const SurvivorOptions& options_;
};

// Whoever has no connection to this rank, and died, is found out by a connection that is refused; one that has decided
// answers a new connection with the farewell. On a side that was cut off heartbeats know only some of the others, and
// all of these must be found silent: together, as soon as the first does not answer.
void reach(TcpTransport& transport, const Words& words, const Agreement& agreement, double waited) {
    const std::vector<int> awaited = agreement.awaited();
    const bool is_cut = words.is_cut();
    if (is_cut) transport.expect_cut();
    if (is_cut || waited > kReachSeconds) transport.reach(awaited);
    const auto is_unanswered = [&](int rank) { return transport.is_unanswered(rank); };
    if (is_cut && std::any_of(awaited.begin(), awaited.end(), is_unanswered)) transport.reach(words.others());
}

// Moves messages along until the agreement is made.
void await(TcpTransport& transport, const SurvivorOptions& options, const Words& words, Agreement& agreement) {
    const double start = seconds_now();
    const Patience& patience = options.patience;
    bool warned = false;
    Backoff backoff(0, 1e-3);
    const auto pause = [&] {
        if (!transport.wait(kWaitSeconds)) backoff.pause();
    };
    for (; !agreement.poll(); pause()) {
        transport.poll();
        const double waited = seconds_now() - start;
        reach(transport, words, agreement, waited);
        const bool late = waited >= patience.timeout_seconds;
        if (!late && (warned || waited < patience.warn_seconds)) continue;
        warned = true;
        const std::string text = "rank " + std::to_string(transport.rank()) + " has waited " +
                                 std::to_string(static_cast<int>(waited)) + " s in ddl_resize or ddl_shrink for " +
                                 name_list(agreement.awaited()) + ": every rank that is alive must call one of them";
        if (late) throw Error(DDL_ERROR_TIMEOUT, text);
        options.warn(text);
    }
}

}  // namespace

Survivors agree_on_survivors(TcpTransport& transport, const SurvivorOptions& options) {
    Survivors result;
    try {
        Words words(transport, options);
        Agreement agreement(words);
        await(transport, options, words, agreement);
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
