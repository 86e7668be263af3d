// Messages between two ranks: those that one rank has been asked to send and to receive, and those that arrived for
// which nobody has asked yet. Matched by communicator, sender and tag, in the order in which they were sent.
//
// An envelope goes ahead of each message, on one tag for all; a payload of few bytes rides in it. A longer one waits at
// its sender until it is asked for, and comes in pieces, so that both sides see it move.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "base/scratch.h"
#include "base/status.h"
#include "engine/header.h"
#include "engine/watch.h"
#include "transport/transport.h"

namespace ddl {

class Request;

// Whose messages: the caller's, or the library's own. They never match one another.
enum class Channel : uint8_t { user, library };

// A message as it was asked for. Ranks are the world's.
struct Mail {
    bool incoming = false;
    Channel channel = Channel::user;
    CommKey comm;
    std::vector<int> peers;  // the receiver; of an incoming one, who may be its sender
    int64_t tag = 0;
    DataType type = DDL_UINT8;
    uint64_t count = 0;
    const void* from = nullptr;
    void* to = nullptr;
    std::vector<int> ranks;  // what `peers` are called in the communicator
    int* source = nullptr;   // gets the one of `ranks` that sent it; may be nullptr
};

// A message under way.
class Letter {
  public:
    Mail mail;
    std::shared_ptr<Request> request;
    double posted = 0;  // seconds of the engine's clock
    double moved = 0;   // likewise: when it was posted or matched, or a piece of it last arrived at its receiver
    Patience patience;
    bool warned = false;   // since it moved
    bool matched = false;  // of an incoming one: its envelope is here
    int peer = -1;         // with whom it is exchanged: the receiver; of an incoming one that is matched, its sender
    size_t payload = 0;    // bytes that do not ride in the envelope
    size_t passed = 0;     // those of them that have reached the receiver
    Status status;
    bool withdrawn = false;  // its communicator broke, for this reason:
    std::shared_ptr<const Status> cause;

  private:
    friend class Mailbox;
    struct Piece {
        Ticket ticket = 0;  // 0: there is none
        size_t bytes = 0;
    };
    // What the transport uses, which may be for longer than the letter lives.
    struct Flight {
        Ticket envelope = 0;
        Scratch scratch;              // the envelope that is sent
        std::array<Piece, 2> pieces;  // under way at once: the next one begins while the last one ends
    };
    std::list<Flight> flight;  // one: to hand it on needs no memory
    Tag tag = 0;               // of the pieces
    size_t begun = 0;          // bytes of the payload
    double ended_at = 0;       // when it failed or was withdrawn
};

// Not thread-safe: the engine's progress lock guards it. Throws nothing but std::bad_alloc. Receives of envelopes stay
// posted, so it must be closed before its transport. `settle_seconds` is EngineOptions'.
class Mailbox {
  public:
    Mailbox(Transport& transport, ScratchPool& pool, double settle_seconds)
        : transport_(transport),
          pool_(pool),
          settle_seconds_(settle_seconds),
          lines_(static_cast<size_t>(transport.size())) {}
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;
    ~Mailbox() { close(); }

    void post(Letter letter);
    // Moves messages along, and takes out those that are finished, or failed, into `over`. True if one moved.
    bool poll(std::list<Letter>* over) noexcept;
    // Takes back what is under way on a communicator. Each letter is over as soon as its buffer is the caller's again.
    void withdraw(const CommKey& comm, const std::shared_ptr<const Status>& cause) noexcept;
    // Forgets what arrived for a communicator that was freed.
    void forget(const CommKey& comm);
    // Takes everything back, and leaves to the transport the memory that it still uses: for ever.
    void close();

    // Letters of a communicator that are under way.
    size_t count_of(const CommKey& comm) const;
    const Letter* first_of(const CommKey& comm) const;
    std::list<Letter>& letters() { return letters_; }
    const std::list<Letter>& letters() const { return letters_; }
    bool empty() const { return letters_.empty() && unsettled_.empty(); }

  private:
    // On the wire as it stands, like Header.
    struct Envelope {
        uint32_t magic = 0;
        uint32_t comm = 0;
        uint64_t birth = 0;
        uint64_t number = 0;  // messages from its sender to its receiver before this one
        uint64_t count = 0;
        int64_t tag = 0;
        uint8_t type = 0, channel = 0;
        uint8_t reserved[22] = {};
    };
    static_assert(sizeof(Envelope) == 64);
    struct Arrival {
        int from = -1;
        Envelope envelope;
        Scratch content;  // the envelope, and the payload that rides in it
    };
    // From one other rank, and to it.
    struct Line {
        Ticket ticket = 0;        // of the next envelope; 0: not awaited
        std::list<Arrival> next;  // where it goes, while it is awaited: one, so that to take it needs no memory
        uint64_t sent = 0;
        bool broken = false;
        bool deaf = false;  // there was no memory to await the next one
    };
    using Flight = Letter::Flight;

    static bool matches(const Mail& mail, const Arrival& arrival);
    static bool inlines(const Envelope& envelope);
    bool wanted(int peer) const;
    void listen(int peer);
    void listen_on(int peer) noexcept;
    bool hear(int peer) noexcept;
    void receive(Letter& letter);
    void deliver(Letter& letter, const Arrival& arrival) noexcept;
    void send(Letter& letter);
    void begin_pieces(Letter& letter) noexcept;
    bool advance(Letter& letter) noexcept;
    bool end(Letter& letter) noexcept;
    void take_back(Flight& flight) noexcept;
    void take_back(Ticket& ticket) noexcept;
    static bool is_over(const Flight& flight);
    bool settle(Flight& flight) noexcept;
    void settle(Ticket& ticket) noexcept;

    Transport& transport_;
    ScratchPool& pool_;
    const double settle_seconds_;
    std::vector<Line> lines_;  // by rank of the world
    std::list<Letter> letters_;
    std::list<Flight> unsettled_;  // of letters that are over for their callers, while the transport uses their memory
    std::list<Arrival> arrivals_;
};

// "receive from rank 2 (host b) on communicator 0 (tag 5, float32, 10 elements)"; `names` as in Group.
std::string describe(const Mail& mail, const std::vector<std::string>& names);

}  // namespace ddl
