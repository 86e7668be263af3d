// One end of a connection between two ranks: frames, some with a payload, both ways, and its passage from one epoch of
// the job to the next.
//
// Each end marks the end of an epoch on the connection: it parks it. What the other end sent in the old epoch, before
// its own mark, is dropped, and what it sends after the mark is not read before this end is in the next epoch, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "transport/socket.h"
#include "transport/transport.h"

namespace ddl {

// The head of each frame, on the wire as it stands.
struct TcpFrame {
    enum Kind : uint32_t {
        eager = 1,  // the whole message
        announce,   // it is there, and its payload is not
        ask,        // the receiver has a receive for it
        payload,    // here it is
        withdraw,   // the sender has taken back a message that it announced
        notice,
        credit,  // bytes that the sender may send before it is asked
        goodbye,
        word,
        park  // the epoch ends here; the payload says how
    };
    uint32_t kind = 0;
    Tag tag = 0;            // of a notice: how many ranks it must be passed on to
    uint64_t bytes = 0;     // of the message; of a credit: given back
    uint64_t sender = 0;    // the sender's ticket; of a notice: the rank that began it
    uint64_t receiver = 0;  // the receiver's ticket
};

class TcpConnection {
  public:
    struct Out {
        TcpFrame frame;
        const std::byte* data = nullptr;
        size_t bytes = 0;
        Ticket ticket = 0;  // that is done when this has left; 0: none
        std::unique_ptr<std::byte[]> copy;
        size_t written = 0;  // of the frame and the data
    };
    // Where an arriving payload goes; no target: it is dropped.
    struct In {
        std::byte* target = nullptr;
        Ticket receive = 0;  // that it is for; 0: none
        std::unique_ptr<std::byte[]> copy;
    };
    // Gets what arrives, and what becomes of what leaves.
    class Owner {
      public:
        // A frame's head. Throws std::bad_alloc; then nothing has changed. False: it is none of ours.
        virtual bool begin(const TcpFrame& frame, In* in) = 0;
        // The payload is here. Throws std::bad_alloc; then nothing has changed.
        virtual void end(const TcpFrame& frame, In& in) = 0;
        virtual void sent(Ticket ticket) noexcept = 0;
        // The connection broke. `ended`: the other end has closed it, as a process's end does. `is_void`: before a
        // frame came, and not because the other end was silent.
        virtual void lost(bool ended, bool is_void) noexcept = 0;

      protected:
        ~Owner() = default;
    };

    // A copy of `bytes` bytes behind this head.
    static Out copy_of(TcpFrame frame, const void* data, size_t bytes);

    const Socket& socket() const { return socket_; }
    bool is_open() const { return static_cast<bool>(socket_); }
    // `was_heard`: the other end is known to be there.
    void open(Socket socket, bool was_heard = false);

    void push(Out out) { out_.push_back(std::move(out)); }
    // Sends what the kernel takes.
    void flush(Owner& owner) noexcept;
    // Reads and takes frames, as far as there is memory for them.
    void hear(Owner& owner) noexcept;
    // Something waits to leave, or for memory.
    bool is_busy() const { return !out_.empty() || is_stuck_; }
    bool is_stuck() const { return is_stuck_; }
    void close();

    // The memory of a message is the caller's again. True if it was on its way out, and goes on from a copy. Throws
    // std::bad_alloc.
    bool forget(Ticket ticket);

    // Ends the epoch on this end: what was not begun is dropped, but words are not.
    void park(const std::vector<std::byte>& farewell);
    bool is_parked() const { return parked_; }
    // The next epoch begins on this end, if it has parked the connection.
    void renew();
    // Before open(), if the connection was begun in an epoch before this one. The other end gets a mark for each of
    // these that have ended, with its farewell, and then what waits here.
    void follow(const std::vector<std::vector<std::byte>>& farewells);

  private:
    bool read(Owner& owner);
    void digest(Owner& owner);
    void lose(Owner& owner, bool ended) noexcept;

    Socket socket_;
    std::deque<Out> out_;
    bool parked_ = false, parked_there_ = false;
    bool was_heard_ = false;
    uint32_t stale_ = 0;  // marks of epochs that this end has left, and that it has still to read
    // Bytes that were read but not looked at, and the payload that is arriving. The buffer is not initialised:
    // with hundreds of connections most of its pages are never used.
    std::unique_ptr<std::byte[]> buffer_;
    size_t begin_ = 0, end_ = 0;
    bool is_stuck_ = false;  // there was no memory for a message in the buffer: it is looked at again
    TcpFrame frame_;
    bool in_payload_ = false;
    size_t left_bytes_ = 0;
    In in_;
};

}  // namespace ddl
