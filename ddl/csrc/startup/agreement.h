// How the ranks of an epoch that are alive agree on who they are, whoever dies meanwhile.
//
// The lowest rank that is not gone leads. Every other rank joins it; once all have joined that are not gone, it
// decides, and every rank that hears the decision passes it on to all before it acts on it. If the leader dies, the
// next one asks again: a rank that has decided says so, and its decision stands. A rank that has joined a leader no
// longer heeds a decision of an earlier one. So all ranks that stay alive decide the same, in two messages for each
// rank and leader, if no rank is taken for dead that lives. Because a cut network can do just that, ranks only go on if
// they outnumber those that are silent: of two halves at most one does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddl {

enum class Fate : uint8_t {
    here,
    left,    // it has left the job in good order
    ended,   // its process has ended
    silent,  // it, or the network to it, does not answer: it may be alive
};

class Agreement {
  public:
    // What it stands on. A message of a rank that lives arrives, and messages of a pair stay in order.
    class Links {
      public:
        virtual ~Links() = default;
        virtual int rank() const = 0;
        virtual int size() const = 0;
        virtual void send(int peer, const std::vector<std::byte>& word) = 0;
        // The next message that has arrived; false if there is none.
        virtual bool next(int* from, std::vector<std::byte>* word) = 0;
        // A rank that is gone stays gone. Never asked about this rank.
        virtual Fate fate(int rank) const = 0;
    };

    // `links` must outlive it, and carry nothing else.
    explicit Agreement(Links& links);

    // Moves on; does not block. True once it is decided. Throws Error(DDL_ERROR_PEER_LOST): this rank is cut off, or
    // the others hold it for dead.
    bool poll();
    // Only if decided: ascending, with this rank.
    const std::vector<int>& survivors() const { return survivors_; }
    // Whom this rank waits for.
    std::vector<int> awaited() const;

  private:
    struct Head;
    bool is_gone(int rank) const { return rank != links_.rank() && links_.fate(rank) != Fate::here; }
    int leader() const;
    void hear(int from, const std::vector<std::byte>& word);
    void lead();
    void check_majority(const std::vector<int>& survivors) const;
    void decide(int ballot, std::vector<int> survivors);

    Links& links_;
    int ballot_ = -1;           // the leader that this rank has joined last
    std::vector<bool> joined_;  // by rank: who has joined this rank
    struct Decision {
        int ballot = -1;  // -1: none
        std::vector<int> survivors;
    };
    std::vector<Decision> heard_;  // by rank: the decisions of earlier leaders
    bool decided_ = false;
    std::vector<int> survivors_;
};

}  // namespace ddl
