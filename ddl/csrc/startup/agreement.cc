#include "startup/agreement.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/status.h"

namespace ddl {

// A message: this, and behind it an offer, or of a decision a bit for each rank that survives.
struct Agreement::Head {
    enum Kind : uint32_t { offer = 1, question, join, decision };
    uint32_t kind = 0;
    int32_t ballot = -1;  // the leader that offers, is asked or joined, or has decided
    uint64_t newcomers = 0;
};

Agreement::Agreement(Links& links)
    : links_(links),
      joined_(static_cast<size_t>(links.size())),
      offers_(static_cast<size_t>(links.size())),
      heard_(static_cast<size_t>(links.size())) {}

std::vector<std::byte> Agreement::word_of(const Head& head, const std::vector<std::byte>& body) {
    std::vector<std::byte> word(sizeof head + body.size());
    std::memcpy(word.data(), &head, sizeof head);
    std::copy(body.begin(), body.end(), word.begin() + sizeof head);
    return word;
}

int Agreement::leader() const {
    int rank = 0;
    while (is_gone(rank)) ++rank;  // this rank is not
    return rank;
}

std::vector<int> Agreement::awaited() const {
    if (leader() != links_.rank()) return {leader()};
    std::vector<int> ranks;
    for (int rank = 0; rank < links_.size(); ++rank) {
        const auto index = static_cast<size_t>(rank);
        const bool known = joined_[index] || heard_[index].ballot >= 0;
        if (rank != links_.rank() && !known && !is_gone(rank)) ranks.push_back(rank);
    }
    return ranks;
}

bool Agreement::poll() {
    int from = -1;
    for (std::vector<std::byte> word; mine_.ballot < 0 && links_.next(&from, &word);) hear(from, word);
    if (mine_.ballot >= 0) return true;
    const int first = leader();
    if (first > ballot_) follow(first);
    const auto& offer = offers_[static_cast<size_t>(first)];
    if (mine_.ballot < 0 && !prepared_ && offer && links_.prepare(*offer, &ready_)) {
        prepared_ = true;
        if (first != links_.rank()) links_.send(first, word_of({Head::join, first, ready_}, {}));
    }
    if (mine_.ballot < 0 && first == links_.rank() && prepared_ && awaited().empty()) lead();
    return mine_.ballot >= 0;
}

// There is a new leader.
void Agreement::follow(int first) {
    ballot_ = first;
    prepared_ = false;
    ready_ = 0;
    Decision& its = heard_[static_cast<size_t>(first)];
    if (its.ballot >= 0) {  // it had decided before it could lead, and will decide nothing else
        its.ballot = first;
        return decide(std::move(its));
    }
    if (first != links_.rank()) {
        // It may have decided with an earlier leader, and answers then.
        if (first > 0) links_.send(first, word_of({Head::question, first}, {}));
        return;
    }
    // What an earlier leader offered is offered once more: others may be ready for it, or have decided for it.
    std::vector<std::byte> offer;
    for (int earlier = first; offer.empty() && earlier-- > 0;) {
        offer = offers_[static_cast<size_t>(earlier)].value_or(std::vector<std::byte>());
    }
    if (offer.empty()) offer = links_.offer();
    for (const int rank : awaited()) links_.send(rank, word_of({Head::offer, first}, offer));
    offers_[static_cast<size_t>(first)] = std::move(offer);
}

void Agreement::hear(int from, const std::vector<std::byte>& word) {
    Head head;
    if (word.size() < sizeof head) return;
    std::memcpy(&head, word.data(), sizeof head);
    const auto index = static_cast<size_t>(from);
    if (head.kind == Head::offer) offers_[index].emplace(word.begin() + sizeof head, word.end());
    if (head.kind == Head::join && head.ballot == links_.rank()) {
        joined_[index] = true;
        ready_of_all_ &= head.newcomers;
    }
    const auto size = static_cast<size_t>(links_.size());
    if (head.kind != Head::decision || word.size() != sizeof head + (size + 7) / 8) return;
    Decision its{head.ballot, {}, head.newcomers};
    for (size_t rank = 0; rank < size; ++rank) {
        const auto bits = std::to_integer<unsigned>(word[sizeof head + rank / 8]);
        if ((bits >> rank % 8 & 1) != 0) its.survivors.push_back(static_cast<int>(rank));
    }
    if (from == ballot_) its.ballot = ballot_;  // likewise
    // A later leader may have decided otherwise, if nobody that lives has this decision: only a leader can tell.
    if (its.ballot < ballot_) {
        heard_[index] = std::move(its);
    } else {
        decide(std::move(its));
    }
}

// Everyone who is not gone has joined this rank, or has decided already.
void Agreement::lead() {
    const Decision* earlier = nullptr;
    std::vector<int> here;
    for (int rank = 0; rank < links_.size(); ++rank) {
        if (is_gone(rank)) continue;
        here.push_back(rank);
        if (rank == links_.rank()) continue;
        const Decision& its = heard_[static_cast<size_t>(rank)];
        if (its.ballot >= 0 && (!earlier || its.ballot > earlier->ballot)) earlier = &its;
    }
    if (earlier) return decide({links_.rank(), earlier->survivors, earlier->newcomers});
    check_majority(here);
    decide({links_.rank(), std::move(here), ready_ & ready_of_all_});
}

// Throws unless these ranks may go on without those that are silent.
void Agreement::check_majority(const std::vector<int>& survivors) const {
    size_t silent = 0;
    int first_silent = links_.size();
    for (int rank = links_.size(); rank-- > 0;) {
        if (rank == links_.rank() || links_.fate(rank) != Fate::silent) continue;
        ++silent;
        first_silent = rank;
    }
    if (survivors.size() > silent || (survivors.size() == silent && survivors.front() < first_silent)) return;
    throw Error(DDL_ERROR_PEER_LOST, "rank " + std::to_string(links_.rank()) + " was cut off from the job: " +
                                         std::to_string(silent) + " of its " + std::to_string(links_.size()) +
                                         " ranks do not answer, and may go on without this one");
}

std::vector<std::byte> Agreement::farewell() const {
    std::vector<std::byte> bits((static_cast<size_t>(links_.size()) + 7) / 8);
    for (const int rank : mine_.survivors) bits[static_cast<size_t>(rank) / 8] |= std::byte{1} << rank % 8;
    return word_of({Head::decision, mine_.ballot, mine_.newcomers}, bits);
}

void Agreement::decide(Decision decision) {
    mine_ = std::move(decision);
    for (int rank = 0; mine_.ballot == links_.rank() && rank < links_.size(); ++rank) {
        // To those that are gone, too: they may be only cut off.
        if (rank != links_.rank()) links_.send(rank, farewell());
    }
    if (std::binary_search(mine_.survivors.begin(), mine_.survivors.end(), links_.rank())) return;
    throw Error(DDL_ERROR_PEER_LOST, "rank " + std::to_string(links_.rank()) +
                                         " was cut off from the job for a while: the others go on without it");
}

}  // namespace ddl
