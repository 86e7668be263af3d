#include "transport/transport_shared.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/float_environment.h"

namespace ddl {
namespace {

// Tickets of our own; the wrapped transport's stay what they are. The lower bits are a slot's number, from 1.
constexpr Ticket kOwn = Ticket{1} << 63;
constexpr Ticket kSent = kOwn;  // of a send that is over: there is nothing to remember

// Polls, with messages of this host alone in flight, for each of the wrapped transport, which then has only notices to
// find: asking MPI takes longer than a message through a pipe.
constexpr unsigned kOtherPolls = 128;

}  // namespace

SharedTransport::SharedTransport(std::unique_ptr<Transport> others, HostMemory memory)
    : memory_(std::move(memory)),
      longest_riding_(longest_riding(memory_.pipe_bytes)),
      neighbours_(memory_.ranks.size()),
      by_rank_(static_cast<size_t>(others->size()), nullptr),
      others_(std::move(others)) {
    const auto& ranks = memory_.ranks;
    const auto mine = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
    busy_.reserve(ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) {
        if (i == mine) continue;
        neighbours_[i].out = PipeWriter(memory_.pipe(mine, i), memory_.pipe_bytes);
        neighbours_[i].in = PipeReader(memory_.pipe(i, mine), memory_.pipe_bytes);
        by_rank_[static_cast<size_t>(ranks[i])] = &neighbours_[i];
    }
}

SharedTransport::Slot SharedTransport::take_slot(const Message& message) {
    if (free_.empty()) {
        free_.reserve(messages_.size() + 1);  // so that none is ever lost
        messages_.emplace_back();
        free_.push_back(static_cast<Slot>(messages_.size() - 1));
    }
    const Slot slot = free_.back();
    free_.pop_back();
    messages_[slot] = message;
    return slot;
}

void SharedTransport::free_slot(Slot slot) { free_.push_back(slot); }

// A ticket that the wrapped transport gave.
Ticket SharedTransport::pass(Ticket ticket) {
    ++passed_;
    return ticket;
}

void SharedTransport::attend(Neighbour& its) {
    if (std::exchange(its.busy, true)) return;
    busy_.push_back(&its);  // there is room for all
}

// False if there is no room.
bool SharedTransport::send(Neighbour& its, const Message& message) {
    return rides(message.bytes) ? its.out.write(message.tag, {message.from, message.bytes})
                                : its.out.announce(message.tag, message.bytes);
}

Ticket SharedTransport::isend(int peer, Tag tag, const void* data, size_t bytes) {
    Neighbour* const its = neighbour(peer);
    if (!its) return pass(others_->isend(peer, tag, data, bytes));
    const Message message{State::unsent, peer, tag, data, nullptr, {}, bytes, 0};
    if (rides(bytes) && its->unsent.empty() && send(*its, message)) return kSent;
    // All memory first: every message that is posted must be known.
    const Slot slot = take_slot(message);
    try {
        its->unsent.push_back(slot);
        if (!rides(bytes)) messages_[slot].passed = pass(others_->isend(peer, tag, data, bytes));
    } catch (const std::bad_alloc&) {
        remove(its->unsent, slot);
        free_slot(slot);
        throw;
    }
    send_unsent(*its);
    if (!its->unsent.empty()) attend(*its);
    return kOwn | (slot + Ticket{1});
}

bool SharedTransport::send_now(int peer, Tag tag, const void* head, size_t head_bytes, const void* rest,
                               size_t rest_bytes) {
    Neighbour* const its = neighbour(peer);
    return its && rides(head_bytes + rest_bytes) && its->unsent.empty() &&
           its->out.write(tag, {head, head_bytes, rest, rest_bytes});
}

bool SharedTransport::peek(int peer, Tag tag, const std::byte** data, size_t* bytes) {
    *data = nullptr;
    const Neighbour& its = *neighbour(peer);
    if (!its.awaited.empty() || its.early.count(tag) > 0) return true;  // others are before it
    PipeReader::Message message;
    if (!its.in.peek(&message)) return false;
    if (message.tag == tag && message.rides) *data = its.in.payload_in_one_piece();
    *bytes = message.bytes;
    return true;
}

Ticket SharedTransport::irecv(int peer, Tag tag, void* data, size_t capacity) {
    Neighbour* const its = neighbour(peer);
    if (!its) return pass(others_->irecv(peer, tag, data, capacity));
    return receive(*its, {State::awaited, peer, tag, nullptr, data, {}, capacity, 0});
}

Ticket SharedTransport::irecv_reduce(int peer, Tag tag, const Reduction& reduction, size_t bytes) {
    Neighbour* const its = neighbour(peer);
    if (!its || !rides(bytes)) return 0;
    return receive(*its, {State::awaited, peer, tag, nullptr, nullptr, reduction, bytes, 0});
}

Ticket SharedTransport::receive(Neighbour& its, const Message& message) {
    const Slot slot = take_slot(message);
    try {
        if (!take_early(its, messages_[slot])) its.awaited.push_back(slot);
    } catch (const std::bad_alloc&) {
        free_slot(slot);
        throw;
    }
    hear(its);
    if (!its.awaited.empty()) attend(its);
    return kOwn | (slot + Ticket{1});
}

void SharedTransport::poll() {
    for (Neighbour* const its : busy_) {
        send_unsent(*its);
        hear(*its);
        its->busy = !its->unsent.empty() || !its->awaited.empty();
    }
    busy_.erase(std::remove_if(busy_.begin(), busy_.end(), [](const Neighbour* its) { return !its->busy; }),
                busy_.end());
    const bool idle = free_.size() == messages_.size();
    if (passed_ > 0 || idle || ++polls_ % kOtherPolls == 0) others_->poll();
}

void SharedTransport::poll_all() {
    poll();
    others_->poll_all();
}

void SharedTransport::send_unsent(Neighbour& its) {
    while (!its.unsent.empty()) {
        Message& message = messages_[its.unsent.front()];
        if (!send(its, message)) return;
        message.state = message.passed == 0 ? State::done : State::passed;
        its.unsent.pop_front();
    }
}

// Takes messages from the pipe while any is awaited.
void SharedTransport::hear(Neighbour& its) noexcept {
    PipeReader::Message message;
    while (!its.awaited.empty() && its.in.peek(&message)) {
        try {
            accept(its, message);
        } catch (const std::bad_alloc&) {
            return;  // it stays in the pipe, and is tried again with the next poll
        }
        its.in.drop();
    }
}

void SharedTransport::accept(Neighbour& its, const PipeReader::Message& message) {
    const auto found = std::find_if(its.awaited.begin(), its.awaited.end(),
                                    [&](Slot slot) { return messages_[slot].tag == message.tag; });
    if (found != its.awaited.end()) {
        deliver(messages_[*found], message.bytes, [&](const auto& take) { its.in.read(take); });
        its.awaited.erase(found);
        return;
    }
    Early early;
    early.bytes = message.bytes;
    if (message.rides) {
        early.payload.reset(new std::byte[message.bytes]);
        its.in.read([&](size_t offset, const std::byte* data, size_t bytes) {
            std::memcpy(early.payload.get() + offset, data, bytes);
        });
    }
    its.early.emplace(message.tag, std::move(early));
}

// True if a message for this receive has come already.
bool SharedTransport::take_early(Neighbour& its, Message& receive) {
    if (its.early.empty()) return false;
    const auto first = its.early.lower_bound(receive.tag);
    if (first == its.early.end() || first->first != receive.tag) return false;
    const Early& early = first->second;
    deliver(receive, early.bytes, [&](const auto& take) { take(size_t{0}, early.payload.get(), early.bytes); });
    its.early.erase(first);
    return true;
}

// Gives a message to its receive. Throws std::bad_alloc; then nothing has changed.
template <typename Read>
void SharedTransport::deliver(Message& receive, size_t bytes, Read read) {
    if (!rides(bytes)) {
        // If it is too long, the wrapped transport says so, and lets the sender go.
        const size_t capacity = receive.to ? std::min(bytes, receive.bytes) : 0;
        receive.passed = pass(others_->irecv(receive.peer, receive.tag, receive.to, capacity));
        receive.state = State::passed;
        return;
    }
    const bool fits = bytes <= receive.bytes;
    if (fits && bytes > 0) {
        read([&](size_t offset, const std::byte* data, size_t piece) { put(receive, offset, data, piece); });
    }
    receive.bytes = bytes;
    receive.state = fits ? State::done : State::failed;
}

// A piece of a message that has come, `offset` bytes from its begin.
void SharedTransport::put(const Message& receive, size_t offset, const std::byte* data, size_t bytes) {
    const Reduction& with = receive.reduction;
    if (!with.out) {
        std::memcpy(static_cast<std::byte*>(receive.to) + offset, data, bytes);
        return;
    }
    const std::byte* const mine = with.mine + offset;
    const DefaultFloats floats;  // this may be the user's thread
    combine(with.out + offset, with.incoming_first ? data : mine, with.incoming_first ? mine : data,
            elements_in(bytes, with.type), with.type, with.op);
}

Progress SharedTransport::test(Ticket ticket, size_t* received) {
    if (ticket == kSent) return Progress::done;
    const bool own = (ticket & kOwn) != 0;
    const Slot slot = static_cast<Slot>((ticket & ~kOwn) - 1);
    const State state = own ? messages_[slot].state : State::passed;
    if (state == State::unsent || state == State::awaited) return Progress::pending;
    Progress progress = state == State::done ? Progress::done : Progress::failed;
    if (state == State::passed) {
        progress = others_->test(own ? messages_[slot].passed : ticket, received);
        if (progress == Progress::pending) return progress;
        --passed_;
    } else {
        *received = messages_[slot].bytes;
    }
    if (own) free_slot(slot);
    return progress;
}

bool SharedTransport::cancel(Ticket ticket) {
    if (ticket == kSent) return true;
    const bool own = (ticket & kOwn) != 0;
    const Slot slot = static_cast<Slot>((ticket & ~kOwn) - 1);
    const Ticket passed = own ? messages_[slot].passed : ticket;
    if (passed != 0) {
        // A send that is not taken back will arrive. If its envelope still waits for room, it must arrive as well.
        if (!others_->cancel(passed)) return false;
        --passed_;
    }
    if (!own) return true;
    Neighbour& its = *neighbour(messages_[slot].peer);
    if (messages_[slot].state == State::unsent) remove(its.unsent, slot);
    if (messages_[slot].state == State::awaited) remove(its.awaited, slot);
    free_slot(slot);
    return true;
}

template <typename Slots>
void SharedTransport::remove(Slots& slots, Slot slot) {
    slots.erase(std::remove(slots.begin(), slots.end(), slot), slots.end());
}

}  // namespace ddl
