// The transport over MPI's point-to-point messages.
//
// Data and notices travel on two communicators that nobody else uses. The requests of each stand in an array, which
// poll() tests as a whole: test() is then a look at what it found. Notices are looked for less often: they can wait.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "mpi/mpi_call.h"
#include "mpi/request_array.h"
#include "transport/transport.h"

namespace ddl {

struct MpiTransportOptions {
    // MPI counts bytes in an int: longer messages travel in parts of this size. The same on every rank.
    size_t part_bytes = size_t{1} << 30;
    // Says which ranks are dead. MPI itself does not: its implementations abort, or wait for ever.
    std::function<bool(int rank)> is_dead;
};

class MpiTransport final : public Transport {
  public:
    // `data` and `notices` have the same ranks; they stay the caller's, and must live until close() has returned. Their
    // error handlers become MPI_ERRORS_RETURN. Throws Error if MPI's tags are too few.
    MpiTransport(MPI_Comm data, MPI_Comm notices, MpiTransportOptions options);
    ~MpiTransport() override { close(); }

    int rank() const override { return rank_; }
    int size() const override { return size_; }
    // A receive of more than part_bytes expects a message of exactly its capacity.
    Ticket isend(int peer, Tag tag, const void* data, size_t bytes) override;
    Ticket irecv(int peer, Tag tag, void* data, size_t capacity) override;
    void poll() override;
    void poll_all() override;
    // MPI reports sends as complete that it still holds, and moves them only when it is called.
    bool is_busy() const override { return polls_for_sends_ > 0; }
    Progress test(Ticket ticket, size_t* received) override;
    bool cancel(Ticket ticket) override;
    void notify(int peer, const void* data, size_t bytes) override;
    bool next_notice(Notice* notice) override;
    bool is_dead(int rank) const override { return options_.is_dead && options_.is_dead(rank); }

    // Takes back what is posted; the last call. The communicators are not to be used again: messages may still arrive.
    // Doing it twice does nothing.
    void close() override;

  private:
    struct Part {  // of a message
        bool is_send = false;
        Ticket ticket = 0;
    };
    struct NoticePart {
        bool is_send = false;
        std::unique_ptr<std::byte[]> copy;
        uint64_t turn = 0;  // of a receive: the order in which they were posted
    };
    // A message: as many parts as it takes.
    struct Message {
        bool failed = false;
        int parts_left = 0;
        size_t received = 0;
    };

    template <typename Post>
    Ticket post(bool is_send, size_t bytes, Post post_part);
    void finish_part(size_t index, const MPI_Status& status, int error);
    void poll_notices();
    void finish_notice(size_t index, const MPI_Status& status, int error);
    void await_notice(size_t index);
    Message& message(Ticket ticket) { return messages_[static_cast<size_t>(ticket) - 1]; }

    const MPI_Comm data_, notices_;
    const MpiTransportOptions options_;
    int rank_ = -1, size_ = 0;
    bool closed_ = false;

    RequestArray<Part> parts_;
    std::vector<Message> messages_;
    std::vector<Ticket> free_messages_;  // a ticket is the message's index, from 1
    unsigned polls_ = 0;
    unsigned polls_for_sends_ = 0;  // of poll_all(), that the last sends may need
    RequestArray<NoticePart> notice_parts_;
    uint64_t turns_ = 0;
    std::vector<std::pair<uint64_t, Notice>> arriving_;  // in this poll(), with their turns
    std::deque<Notice> arrived_;
};

}  // namespace ddl
