// Point-to-point messages between the ranks of a job, on which the engine stands. TCP and MPI implement it, and shared
// memory in front of either.
//
// The engine calls one function of a transport at a time (under its progress lock), from changing threads: an MPI
// implementation needs MPI_THREAD_SERIALIZED if nobody else calls MPI. No function but wait() and close() blocks. None
// throws anything but std::bad_alloc, and one that does has changed nothing; poll(), test() and cancel() throw nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace ddl {

// Messages of one pair and one tag are matched in the order they were posted in. 21 bits, which every MPI's tags have.
using Tag = uint32_t;
constexpr int kTagBits = 21;

// A message in flight. Never 0. Sends that are over at once may share one: as many calls of test() or cancel() end it.
using Ticket = uint64_t;

enum class Progress : uint8_t { pending, done, failed };

// A small message outside all order, for diagnosis.
struct Notice {
    int from = -1;
    std::vector<std::byte> content;
};
constexpr size_t kNoticeBytes = 1024;  // most content of one

// What a message is combined with as it is received: out[i] = message[i] op mine[i], or with the operands swapped.
struct Reduction {
    std::byte* out = nullptr;
    const std::byte* mine = nullptr;  // may be `out`
    DataType type = DDL_UINT8;
    ReduceOp op = DDL_SUM;
    bool incoming_first = false;
};

class Transport {
  public:
    virtual ~Transport() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;

    // Begins to send `bytes` bytes from `data`, or to receive at most `capacity` bytes into `data`. `data` must stay
    // valid, and unchanged by anybody else, until test() says that the ticket is done or failed, or cancel() that it is
    // taken back. A message that is longer than the capacity fails its receiver. `peer` is a rank other than this one.
    virtual Ticket isend(int peer, Tag tag, const void* data, size_t bytes) = 0;
    virtual Ticket irecv(int peer, Tag tag, void* data, size_t capacity) = 0;

    // Like irecv(), but the message is reduced where the transport has it, and nothing of it is kept. 0 if the
    // transport cannot do that with a message of so many bytes; it has done nothing then. `reduction` is copied.
    virtual Ticket irecv_reduce(int /*peer*/, Tag /*tag*/, const Reduction& /*reduction*/, size_t /*bytes*/) {
        return 0;
    }

    // Sends a message of two parts, `head` before `rest`, if it can be copied at once: nothing of it is used later,
    // and there is no ticket. Otherwise does nothing and returns false.
    virtual bool send_now(int /*peer*/, Tag /*tag*/, const void* /*head*/, size_t /*head_bytes*/, const void* /*rest*/,
                          size_t /*rest_bytes*/) {
        return false;
    }

    // Whether a message of so many bytes from `peer` can be read in place, by peek() and drop().
    virtual bool shows(int /*peer*/, size_t /*bytes*/) const { return false; }
    // Looks for the message that a receive from `peer` with this tag would get. False if nothing has come that may be
    // it. Otherwise `data` points to its first byte and `bytes` is its length; or `data` is null, and it has to be
    // received.
    virtual bool peek(int /*peer*/, Tag /*tag*/, const std::byte** data, size_t* /*bytes*/) {
        *data = nullptr;
        return true;
    }
    // Takes the message that peek() has just shown; no other call may come between.
    virtual void drop(int /*peer*/) {}

    // Moves messages along; called before each round of test().
    virtual void poll() {}
    // The same, and all that it does less often than that, such as to look for notices.
    virtual void poll_all() { poll(); }

    // A descriptor that can be read while poll_all() would find a message; -1: there is none. For any thread, without
    // the lock.
    virtual int ready() const { return -1; }
    // Something is left to do that neither ready() nor a ticket in flight shows.
    virtual bool is_busy() const { return false; }
    // Waits until poll() may find something, at most so long. False at once if the transport cannot wait.
    virtual bool wait(double /*seconds*/) { return false; }

    // Where a message stands; `done` and `failed` end its ticket. For a receive that is done, `received` is its length.
    virtual Progress test(Ticket ticket, size_t* received) = 0;

    // Takes a message back, whatever its state: its ticket has ended, and its memory is used no more. False if that
    // cannot be done (MPI takes back no send, and no receive that has begun to arrive): the memory is in use and the
    // ticket lives on until test() says otherwise, which may be never. Messages of this pair and tag may not be matched
    // correctly afterwards.
    virtual bool cancel(Ticket ticket) = 0;

    // Sends at most kNoticeBytes. They are copied; nobody learns whether they arrived.
    virtual void notify(int peer, const void* data, size_t bytes) = 0;
    // The same to all of these but this rank; over others of them, if a connection to each is too much.
    virtual void tell(const std::vector<int>& peers, const void* data, size_t bytes) {
        for (const int peer : peers) {
            if (peer != rank()) notify(peer, data, bytes);
        }
    }

    // The oldest notice that arrived and was not taken yet; false if there is none.
    virtual bool next_notice(Notice* notice) = 0;

    // True from when a rank is known to be dead: its process ended or its host is gone. For this rank itself: it is cut
    // off for good. Must be cheap: it is asked about every member, a hundred times a second while requests wait.
    virtual bool is_dead(int rank) const = 0;
    // True from when this rank was found to have closed its transport in good order, if the transport can tell. As
    // cheap.
    virtual bool has_left(int /*rank*/) const { return false; }
    // Finds out whether these ranks are still there, if this one waits for them in vain: makes a connection to each
    // that there is none to yet.
    virtual void reach(const std::vector<int>& /*ranks*/) {}

    // Lets what was sent leave; the last call. Doing it twice does nothing.
    virtual void close() {}
};

}  // namespace ddl
