// How the ranks of an epoch that are alive agree on who belongs to the next one, whoever dies meanwhile: themselves,
// and newcomers that all of them are ready for.
//
// The lowest rank that is not gone leads, and offers to all the newcomers that wait. Every other rank joins it, and
// says which of them it is ready for. Once all have joined that are not gone, it decides, and tells all. Who hears the
// decision acts on it at once, and from then on answers with it whoever speaks of this epoch: it is the farewell of the
// epoch. If the leader dies, the next one makes the same offer: a rank that has decided answers so, and its decision
// stands. A rank that knows a later leader no longer heeds a decision of an earlier one. So all ranks that stay alive
// decide the same, in four messages for each rank and leader, if no rank is taken for dead that lives. Because a cut
// network can do just that, ranks only go on if they outnumber those that are silent: of two halves at most one does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
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
    // What it stands on. A message of a rank that lives arrives, and messages of a pair stay in order. Those that are
    // awaited() come to have a connection to this rank: one of them may have decided, and only answers.
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
        // Which newcomers wait at this rank, in words for prepare(); empty: none.
        virtual std::vector<std::byte> offer() { return {}; }
        // Gets ready for the newcomers of an offer, of whom bits stand in `ready`. False: not yet, to be called again.
        virtual bool prepare(const std::vector<std::byte>& /*offer*/, uint64_t* /*ready*/) { return true; }
    };

    // `links` must outlive it, and carry nothing else.
    explicit Agreement(Links& links);

    // Moves on; does not block. True once it is decided; it is not to be called then. Throws
    // Error(DDL_ERROR_PEER_LOST): this rank is cut off, or the others hold it for dead.
    bool poll();
    // Only if decided: ascending, with this rank.
    const std::vector<int>& survivors() const { return mine_.survivors; }
    // The newcomers: bits of the last offer that was not empty. All survivors are ready for them.
    uint64_t newcomers() const { return mine_.newcomers; }
    // The leader that has decided. Of two decisions that of the later one stands.
    int ballot() const { return mine_.ballot; }
    // The decision as a word, for ranks that speak of this epoch later.
    std::vector<std::byte> farewell() const;
    // Whom this rank waits for.
    std::vector<int> awaited() const;

  private:
    struct Head;
    struct Decision {
        int ballot = -1;  // -1: none
        std::vector<int> survivors;
        uint64_t newcomers = 0;
    };
    bool is_gone(int rank) const { return rank != links_.rank() && links_.fate(rank) != Fate::here; }
    int leader() const;
    void follow(int first);
    void hear(int from, const std::vector<std::byte>& word);
    void lead();
    void check_majority(const std::vector<int>& survivors) const;
    void decide(Decision decision);
    static std::vector<std::byte> word_of(const Head& head, const std::vector<std::byte>& body);

    Links& links_;
    int ballot_ = -1;                                            // the leader that this rank knows
    bool prepared_ = false;                                      // for its offer
    uint64_t ready_ = 0;                                         // newcomers of it that this rank is ready for
    std::vector<bool> joined_;                                   // by rank: who has joined this rank
    uint64_t ready_of_all_ = ~uint64_t{0};                       // newcomers that all of these are ready for
    std::vector<std::optional<std::vector<std::byte>>> offers_;  // by leader
    std::vector<Decision> heard_;                                // by rank: the decisions of earlier leaders
    Decision mine_;
};

}  // namespace ddl
