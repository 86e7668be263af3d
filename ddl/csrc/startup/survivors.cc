#include "startup/survivors.h"

#include <algorithm>

#include "base/backoff.h"
#include "base/status.h"
#include "startup/agreement.h"

namespace ddl {
namespace {

// For which a connection may be broken until heartbeats say why.
constexpr double kCauseSeconds = 1;

class TcpLinks final : public Agreement::Links {
  public:
    TcpLinks(TcpTransport& transport, const SurvivorOptions& options) : transport_(transport), options_(options) {}

    int rank() const override { return transport_.rank(); }
    int size() const override { return transport_.size(); }
    void send(int peer, const std::vector<std::byte>& word) override { transport_.say(peer, word); }
    bool next(int* from, std::vector<std::byte>* word) override { return transport_.next_word(from, word); }
    Fate fate(int rank) const override {
        if (transport_.has_left(rank)) return Fate::left;
        if (transport_.has_ended(rank)) return Fate::ended;
        switch (options_.death_of(rank)) {
            case Death::ended: return Fate::ended;
            case Death::silent: return Fate::silent;
            case Death::none: break;
        }
        return transport_.seconds_lost(rank) > kCauseSeconds ? Fate::silent : Fate::here;
    }

  private:
    TcpTransport& transport_;
    const SurvivorOptions& options_;
};

std::string name_list(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank" : "ranks";
    constexpr size_t kShown = 8;
    for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) text += (i ? ", " : " ") + std::to_string(ranks[i]);
    return ranks.size() > kShown ? text + " and " + std::to_string(ranks.size() - kShown) + " more" : text;
}

// Moves messages along until done() is true; awaited() are those who keep this rank waiting.
void await(TcpTransport& transport, const Patience& patience, const std::function<void(const std::string&)>& warn,
           const std::function<bool()>& done, const std::function<std::vector<int>()>& awaited) {
    const double start = seconds_now();
    bool warned = false;
    for (Backoff backoff(0, 1e-3); !done(); backoff.pause()) {
        transport.poll();
        const double waited = seconds_now() - start;
        const bool late = waited >= patience.timeout_seconds;
        if (!late && (warned || waited < patience.warn_seconds)) continue;
        warned = true;
        const std::string text = "rank " + std::to_string(transport.rank()) + " has waited " +
                                 std::to_string(static_cast<int>(waited)) + " s in ddl_shrink for " +
                                 name_list(awaited()) + ": every rank that is alive must call it";
        if (late) throw Error(DDL_ERROR_TIMEOUT, text);
        warn(text);
    }
}

}  // namespace

Survivors agree_on_survivors(TcpTransport& transport, const SurvivorOptions& options) {
    Survivors result;
    try {
        TcpLinks links(transport, options);
        Agreement agreement(links);
        await(
            transport, options.patience, options.warn, [&] { return agreement.poll(); },
            [&] { return agreement.awaited(); });
        result.ranks = agreement.survivors();
        const auto pending = [&] {
            std::vector<int> ranks;
            for (const int rank : result.ranks) {
                const bool known = rank == links.rank() || transport.is_parked(rank) || links.fate(rank) != Fate::here;
                if (!known) ranks.push_back(rank);
            }
            return ranks;
        };
        for (const int rank : result.ranks) {
            if (rank != links.rank()) transport.park(rank);
        }
        await(transport, options.patience, options.warn, [&] { return pending().empty(); }, pending);
        result.streams = transport.release(result.ranks);
        for (size_t i = 0; i < result.ranks.size(); ++i) {
            if (result.streams[i].socket || result.ranks[i] == links.rank()) continue;
            result.streams[i].has_ended = links.fate(result.ranks[i]) != Fate::silent;
        }
    } catch (...) {
        transport.close();
        throw;
    }
    transport.close();
    return result;
}

}  // namespace ddl
