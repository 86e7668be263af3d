#include "startup/agreement.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/status.h"

namespace ddl {

// A message: this, and of a decision a bit for each rank that survives.
struct Agreement::Head {
    enum Kind : uint32_t { join = 1, decision };
    uint32_t kind = 0;
    int32_t ballot = -1;  // the leader that is joined, or that has decided
};

Agreement::Agreement(Links& links)
    : links_(links), joined_(static_cast<size_t>(links.size())), heard_(static_cast<size_t>(links.size())) {}

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
    for (std::vector<std::byte> word; !decided_ && links_.next(&from, &word);) hear(from, word);
    if (decided_) return true;
    const int first = leader();
    if (first > ballot_) {
        ballot_ = first;
        Decision& its = heard_[static_cast<size_t>(first)];
        if (its.ballot >= 0) {  // it had decided before it could lead, and will decide nothing else
            decide(first, std::move(its.survivors));
        } else if (first != links_.rank()) {
            const Head head{Head::join, first};
            const auto* bytes = reinterpret_cast<const std::byte*>(&head);
            links_.send(first, {bytes, bytes + sizeof head});
        }
    }
    if (!decided_ && first == links_.rank() && awaited().empty()) lead();
    return decided_;
}

void Agreement::hear(int from, const std::vector<std::byte>& word) {
    Head head;
    if (word.size() < sizeof head) return;
    std::memcpy(&head, word.data(), sizeof head);
    const auto index = static_cast<size_t>(from);
    if (head.kind == Head::join && head.ballot == links_.rank()) joined_[index] = true;
    const auto size = static_cast<size_t>(links_.size());
    if (head.kind != Head::decision || word.size() != sizeof head + (size + 7) / 8) return;
    Decision its{head.ballot, {}};
    for (size_t rank = 0; rank < size; ++rank) {
        const auto bits = std::to_integer<unsigned>(word[sizeof head + rank / 8]);
        if ((bits >> rank % 8 & 1) != 0) its.survivors.push_back(static_cast<int>(rank));
    }
    if (from == ballot_) its.ballot = ballot_;  // likewise
    // A later leader may have decided otherwise, if nobody that lives has this decision: only a leader can tell.
    if (its.ballot < ballot_) {
        heard_[index] = std::move(its);
    } else {
        decide(its.ballot, std::move(its.survivors));
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
    if (earlier) return decide(links_.rank(), earlier->survivors);
    check_majority(here);
    decide(links_.rank(), std::move(here));
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

void Agreement::decide(int ballot, std::vector<int> survivors) {
    decided_ = true;
    survivors_ = std::move(survivors);
    const Head head{Head::decision, ballot};
    const auto size = static_cast<size_t>(links_.size());
    std::vector<std::byte> word(sizeof head + (size + 7) / 8);
    std::memcpy(word.data(), &head, sizeof head);
    for (const int rank : survivors_) word[sizeof head + static_cast<size_t>(rank) / 8] |= std::byte{1} << rank % 8;
    for (int rank = 0; rank < links_.size(); ++rank) {
        if (rank != links_.rank()) links_.send(rank, word);  // to those that are gone, too: they may be only cut off
    }
    if (std::binary_search(survivors_.begin(), survivors_.end(), links_.rank())) return;
    throw Error(DDL_ERROR_PEER_LOST, "rank " + std::to_string(links_.rank()) +
                                         " was cut off from the job for a while: the others go on without it");
}

}  // namespace ddl
