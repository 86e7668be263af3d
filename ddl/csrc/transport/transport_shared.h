// The transport of a rank whose host has other ranks of the job: to them through memory that they share
// (host_memory.h), to all others, and for notices and deaths, through another transport, which it wraps.
//
// One pipe leads from each rank of the host to each other. The envelope of EVERY message between them goes through it;
// a short one rides behind its envelope, a longer one goes through the wrapped transport. Which of the two is
// decided by the message's length, which the envelope tells the receiver, and not by how much a receive has room for.
//
// Messages of a pair and a tag are matched in the order they were posted in, as envelopes are, whatever their lengths.
// The wrapped transport is asked to send a message when it is posted, and to receive it when its envelope has been
// matched: of those of one tag, both sides give it the same messages in the same order, so that it matches them right.
// Nothing is received ahead, so that nothing has to be taken back when another message than expected comes. That costs
// nothing: MPI asks the receiver about long messages anyhow, and the envelope is there before that question.
//
// A message goes straight from the sender's memory into the pipe, and from there to the receiver's, if it is awaited
// by then. One that comes before it is awaited stays in the pipe while this rank awaits nothing from its sender;
// otherwise it makes way for those behind it, and is kept as a copy. So a message whose receive is posted always gets
// through, and a rank that nobody listens to waits, with its messages, for room in its pipe.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "transport/host_memory.h"
#include "transport/pipe.h"
#include "transport/transport.h"

namespace ddl {

class SharedTransport final : public Transport {
  public:
    // `memory` is what all ranks of this one's host have agreed on; there is some. The tickets of `others` are below
    // 2^63.
    SharedTransport(std::unique_ptr<Transport> others, HostMemory memory);

    int rank() const override { return others_->rank(); }
    int size() const override { return others_->size(); }
    Ticket isend(int peer, Tag tag, const void* data, size_t bytes) override;
    Ticket irecv(int peer, Tag tag, void* data, size_t capacity) override;
    Ticket irecv_reduce(int peer, Tag tag, const Reduction& reduction, size_t bytes) override;
    bool send_now(int peer, Tag tag, const void* head, size_t head_bytes, const void* rest, size_t rest_bytes) override;
    bool shows(int peer, size_t bytes) const override {
        return by_rank_[static_cast<size_t>(peer)] != nullptr && rides(bytes);
    }
    bool peek(int peer, Tag tag, const std::byte** data, size_t* bytes) override;
    void drop(int peer) override { neighbour(peer)->in.drop(); }
    void poll() override;
    void poll_all() override;
    int ready() const override { return others_->ready(); }
    bool is_busy() const override { return others_->is_busy(); }
    Progress test(Ticket ticket, size_t* received) override;
    bool cancel(Ticket ticket) override;
    void notify(int peer, const void* data, size_t bytes) override { others_->notify(peer, data, bytes); }
    void tell(const std::vector<int>& peers, const void* data, size_t bytes) override {
        others_->tell(peers, data, bytes);
    }
    bool next_notice(Notice* notice) override { return others_->next_notice(notice); }
    bool is_dead(int rank) const override { return others_->is_dead(rank); }
    bool has_left(int rank) const override { return others_->has_left(rank); }
    void reach(const std::vector<int>& ranks) override { others_->reach(ranks); }
    void close() override { others_->close(); }

  private:
    enum class State : uint8_t {
        unsent,   // a send that awaits room in its pipe
        awaited,  // a receive that no envelope came for
        passed,   // to the wrapped transport, which says the rest
        done,
        failed
    };
    struct Message {
        State state = State::done;
        int peer = -1;
        Tag tag = 0;
        const void* from = nullptr;
        void* to = nullptr;
        Reduction reduction;  // of a receive that is reduced; its `out` is null in all others
        size_t bytes = 0;     // of a send: its length; of a receive: its capacity, then what it received
        Ticket passed = 0;    // to the wrapped transport; 0: it was not
    };
    using Slot = uint32_t;  // of messages_
    // A message that nobody awaits yet.
    struct Early {
        size_t bytes = 0;
        std::unique_ptr<std::byte[]> payload;  // none if it goes through the wrapped transport
    };
    // Another rank of the host.
    struct Neighbour {
        PipeWriter out;
        PipeReader in;
        std::deque<Slot> unsent;
        std::vector<Slot> awaited;
        std::multimap<Tag, Early> early;  // of one tag in order
        bool busy = false;                // it is in busy_
    };

    Neighbour* neighbour(int peer) { return by_rank_[static_cast<size_t>(peer)]; }
    bool rides(size_t bytes) const { return bytes <= longest_riding_; }
    Slot take_slot(const Message& message);
    void free_slot(Slot slot);
    Ticket pass(Ticket ticket);
    Ticket receive(Neighbour& its, const Message& message);
    void attend(Neighbour& its);
    bool send(Neighbour& its, const Message& message);
    void send_unsent(Neighbour& its);
    void hear(Neighbour& its) noexcept;
    void accept(Neighbour& its, const PipeReader::Message& message);
    bool take_early(Neighbour& its, Message& receive);
    template <typename Read>
    void deliver(Message& receive, size_t bytes, Read read);
    static void put(const Message& receive, size_t offset, const std::byte* data, size_t bytes);
    template <typename Slots>
    static void remove(Slots& slots, Slot slot);

    const HostMemory memory_;
    const size_t longest_riding_;
    std::vector<Neighbour> neighbours_;
    std::vector<Neighbour*> by_rank_;  // null: not of this host
    std::vector<Neighbour*> busy_;     // those with something unsent or awaited
    std::vector<Message> messages_;
    std::vector<Slot> free_;
    size_t passed_ = 0;  // messages that the wrapped transport has
    unsigned polls_ = 0;
    const std::unique_ptr<Transport> others_;  // gone before the memory is
};

}  // namespace ddl
