#include "transport/transport_tcp.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/backoff.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr size_t kEagerBytes = 16 << 10;    // longest message that is sent before it is asked for
constexpr size_t kEagerWindow = 256 << 10;  // of such that a receiver keeps, for each peer
constexpr size_t kBuffer = 32 << 10;        // most bytes of one read, except of long payloads
constexpr size_t kMostWord = 64 << 10;
constexpr double kGoodbyeSeconds = 2;  // in which close() lets the rest leave
constexpr int kEvents = 64;

}  // namespace

struct TcpTransport::Frame {
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
        park  // the connection's use by this transport ends here
    };
    uint32_t kind = 0;
    Tag tag = 0;
    uint64_t bytes = 0;     // of the message; of a credit: given back
    uint64_t sender = 0;    // the sender's ticket
    uint64_t receiver = 0;  // the receiver's ticket
};

struct TcpTransport::Message {
    Progress state = Progress::pending;
    int peer = -1;
    Tag tag = 0;
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    size_t bytes = 0;           // of a send: its length; of a receive: its capacity, then what it received
    bool is_announced = false;  // a send whose payload moves when it is asked for
    uint64_t asked = 0;         // of a receive: the sender's ticket of the announced message that it has asked for
};

struct TcpTransport::Out {
    Frame frame;
    const std::byte* data = nullptr;
    size_t bytes = 0;
    Ticket ticket = 0;  // that is done when this has left; 0: none
    std::unique_ptr<std::byte[]> copy;
    size_t written = 0;  // of the frame and the data
};

struct TcpTransport::Peer {
    struct Early {
        Frame frame;
        std::unique_ptr<std::byte[]> payload;
    };
    Socket socket;
    int rank = -1;
    bool lost = false, left = false, ended = false;
    double lost_at = 0;
    bool parked = false, parked_there = false;  // by this end, by the other
    std::deque<Out> out;
    size_t window = kEagerWindow;     // eager bytes that may still be sent
    size_t consumed = 0;              // eager bytes to give back
    std::deque<Ticket> awaited;       // receives that no message has come for, the oldest first
    std::multimap<Tag, Early> early;  // of one tag in order
    // Bytes that were read but not looked at, and the payload that is arriving. The buffer is not initialised:
    // with hundreds of peers most of its pages are never used.
    const std::unique_ptr<std::byte[]> buffer{new std::byte[kBuffer]};
    size_t begin = 0, end = 0;
    bool is_stuck = false;  // there was no memory for a message in the buffer: it is looked at again
    Frame frame;
    bool in_payload = false;
    std::byte* target = nullptr;  // null: the payload is dropped
    size_t left_bytes = 0;
    Ticket receive = 0;  // that the payload is for; 0: none
    std::unique_ptr<std::byte[]> copy;
};

namespace {

std::vector<TcpStream> fresh(std::vector<Socket> sockets) {
    std::vector<TcpStream> streams(sockets.size());
    for (size_t i = 0; i < sockets.size(); ++i) streams[i].socket = std::move(sockets[i]);
    return streams;
}

}  // namespace

TcpTransport::TcpTransport(int rank, std::vector<Socket> sockets, std::function<bool(int)> is_dead)
    : TcpTransport(rank, fresh(std::move(sockets)), std::move(is_dead)) {}

TcpTransport::TcpTransport(int rank, std::vector<TcpStream> streams, std::function<bool(int)> is_dead)
    : rank_(rank), is_dead_(std::move(is_dead)), ready_(epoll_create1(EPOLL_CLOEXEC)) {
    if (ready_ < 0) throw Error(DDL_ERROR_TRANSPORT, std::string("epoll_create1: ") + std::strerror(errno));
    for (size_t i = 0; i < streams.size(); ++i) {
        peers_.push_back(std::make_unique<Peer>());
        Peer& peer = *peers_.back();
        peer.rank = static_cast<int>(i);
        peer.socket = std::move(streams[i].socket);
        peer.lost = !peer.socket && peer.rank != rank_;
        peer.ended = streams[i].has_ended;
        peer.lost_at = seconds_now();
        if (!peer.socket) continue;
        std::copy(streams[i].unread.begin(), streams[i].unread.end(), peer.buffer.get());
        peer.end = streams[i].unread.size();
        keep_alive(peer.socket);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = i;
        if (epoll_ctl(ready_, EPOLL_CTL_ADD, peer.socket.fd(), &event) != 0) {
            throw Error(DDL_ERROR_TRANSPORT, std::string("epoll_ctl: ") + std::strerror(errno));
        }
        digest(peer);
    }
}

TcpTransport::~TcpTransport() {
    close();
    if (ready_ >= 0) ::close(ready_);
}

bool TcpTransport::is_dead(int rank) const {
    return peers_[static_cast<size_t>(rank)]->lost || (is_dead_ && is_dead_(rank));
}

bool TcpTransport::has_left(int rank) const { return at(rank).left; }

bool TcpTransport::has_ended(int rank) const { return at(rank).ended; }

double TcpTransport::seconds_lost(int rank) const { return at(rank).lost ? seconds_now() - at(rank).lost_at : 0; }

// `ended`: the other end has closed it.
void TcpTransport::lose(Peer& peer, bool ended) noexcept {
    if (!peer.socket) return;
    peer.lost = !peer.left && !closed_;
    peer.ended = peer.lost && ended && !was_silent(peer.socket);
    peer.lost_at = seconds_now();
    peer.socket.close();
    peer.out.clear();
}

void TcpTransport::push(Peer& peer, Out out) {
    if (!peer.socket) return;
    peer.out.push_back(std::move(out));
    flush(peer);
}

void TcpTransport::flush(Peer& peer) noexcept {
    while (!peer.out.empty() && peer.socket) {
        Out& out = peer.out.front();
        const size_t head = out.written < sizeof out.frame ? sizeof out.frame - out.written : 0;
        const size_t past = out.written > sizeof out.frame ? out.written - sizeof out.frame : 0;
        iovec parts[2] = {{reinterpret_cast<std::byte*>(&out.frame) + sizeof out.frame - head, head},
                          {const_cast<std::byte*>(out.data) + past, out.bytes - past}};
        msghdr message{};
        message.msg_iov = head > 0 ? parts : parts + 1;
        message.msg_iovlen = (head > 0 ? 1u : 0u) + (parts[1].iov_len > 0 ? 1u : 0u);
        const ssize_t sent = sendmsg(peer.socket.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) lose(peer);
            return;
        }
        out.written += static_cast<size_t>(sent);
        if (out.written < sizeof out.frame + out.bytes) continue;
        if (const auto found = messages_.find(out.ticket); found != messages_.end())
            found->second.state = Progress::done;
        peer.out.pop_front();
    }
}

Ticket TcpTransport::isend(int peer_rank, Tag tag, const void* data, size_t bytes) {
    Peer& peer = at(peer_rank);
    const Ticket ticket = ++last_;
    Message message;
    message.peer = peer_rank;
    message.tag = tag;
    message.from = static_cast<const std::byte*>(data);
    message.bytes = bytes;
    const size_t cost = bytes + sizeof(Frame);
    const bool at_once = bytes <= kEagerBytes && cost <= peer.window;
    message.is_announced = !at_once;
    messages_.emplace(ticket, message);
    Out out;
    out.frame.tag = tag;
    out.frame.bytes = bytes;
    out.frame.sender = ticket;
    out.frame.kind = at_once ? Frame::eager : Frame::announce;
    if (at_once) {
        out.data = message.from;
        out.bytes = bytes;
        out.ticket = ticket;
    }
    try {
        push(peer, std::move(out));
    } catch (const std::bad_alloc&) {
        messages_.erase(ticket);
        throw;
    }
    if (at_once) peer.window -= cost;
    return ticket;
}

Ticket TcpTransport::irecv(int peer_rank, Tag tag, void* data, size_t capacity) {
    Peer& peer = at(peer_rank);
    const Ticket ticket = ++last_;
    Message message;
    message.peer = peer_rank;
    message.tag = tag;
    message.to = static_cast<std::byte*>(data);
    message.bytes = capacity;
    messages_.emplace(ticket, message);
    try {
        await(peer, ticket);
    } catch (const std::bad_alloc&) {
        messages_.erase(ticket);
        throw;
    }
    return ticket;
}

// Gives a receive the message that has come for it, or lets it wait for one. Throws std::bad_alloc; then nothing has
// changed.
void TcpTransport::await(Peer& peer, Ticket ticket) {
    Message& message = messages_.at(ticket);
    const auto found = peer.early.lower_bound(message.tag);
    if (found == peer.early.end() || found->first != message.tag) {
        peer.awaited.insert(std::lower_bound(peer.awaited.begin(), peer.awaited.end(), ticket), ticket);
        return;
    }
    const Peer::Early& early = found->second;
    size_t cost = 0;
    if (early.frame.kind == Frame::eager) {
        finish(message, early.frame.bytes, early.payload.get());
        cost = early.frame.bytes + sizeof(Frame);
    } else {
        ask(peer, ticket, early.frame);
    }
    peer.early.erase(found);
    if (cost > 0) give_credit(peer, cost);
}

// Asks for the payload of an announced message. Throws std::bad_alloc; then nothing has changed.
void TcpTransport::ask(Peer& peer, Ticket ticket, const Frame& announced) {
    Out out;
    out.frame = announced;
    out.frame.kind = Frame::ask;
    out.frame.receiver = ticket;
    push(peer, std::move(out));
    messages_.at(ticket).asked = announced.sender;
}

// A message of `bytes` has come for a receive. `payload`: its bytes, or null if they are in their place already.
void TcpTransport::finish(Message& message, size_t bytes, const std::byte* payload) {
    const bool fits = bytes <= message.bytes;
    if (fits && bytes > 0 && payload) std::memcpy(message.to, payload, bytes);
    message.state = fits ? Progress::done : Progress::failed;
    message.bytes = bytes;
}

void TcpTransport::give_credit(Peer& peer, size_t bytes) {
    peer.consumed += bytes;
    if (peer.consumed < kEagerWindow / 4 || peer.parked) return;
    Out out;
    out.frame.kind = Frame::credit;
    out.frame.bytes = peer.consumed;
    try {
        push(peer, std::move(out));
        peer.consumed = 0;
    } catch (const std::bad_alloc&) {
        // It is given with the next one.
    }
}

void TcpTransport::poll() {
    if (closed_) return;
    for (const auto& peer : peers_) {
        if (!peer->out.empty()) flush(*peer);
        if (peer->is_stuck) hear(*peer);
    }
    epoll_event events[kEvents];
    const int count = epoll_wait(ready_, events, kEvents, 0);
    for (int i = 0; i < count; ++i) hear(*peers_[events[i].data.u64]);
}

bool TcpTransport::wait(double seconds) {
    const auto is_busy = [](const auto& peer) { return !peer->out.empty() || peer->is_stuck; };
    if (closed_ || std::any_of(peers_.begin(), peers_.end(), is_busy)) return false;
    epoll_event event;
    epoll_wait(ready_, &event, 1, static_cast<int>(seconds * 1e3));
    return true;
}

// Reads and takes messages, as far as there is memory for them.
void TcpTransport::hear(Peer& peer) noexcept {
    try {
        bool more = true;
        digest(peer);
        while (more && peer.socket && !peer.parked_there) {
            more = read(peer);
            digest(peer);
        }
        peer.is_stuck = false;
    } catch (const std::bad_alloc&) {
        peer.is_stuck = true;
    }
}

// Reads once: a long payload straight to its place. False if nothing more is there now.
bool TcpTransport::read(Peer& peer) {
    const bool direct = peer.in_payload && peer.target && peer.left_bytes >= kBuffer;  // the buffer is empty then
    if (!direct && peer.begin > 0) {
        std::memmove(peer.buffer.get(), peer.buffer.get() + peer.begin, peer.end - peer.begin);
        peer.end -= std::exchange(peer.begin, 0);
    }
    void* const to = direct ? peer.target : peer.buffer.get() + peer.end;
    const size_t room = direct ? peer.left_bytes : kBuffer - peer.end;
    const ssize_t count = recv(peer.socket.fd(), to, room, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) return true;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (count <= 0) {
        lose(peer, count == 0);
        return false;
    }
    if (direct) {
        peer.target += count;
        peer.left_bytes -= static_cast<size_t>(count);
    } else {
        peer.end += static_cast<size_t>(count);
    }
    return static_cast<size_t>(count) == room;
}

// Takes frames and payloads from the buffer. Throws std::bad_alloc; the rest is taken the next time.
void TcpTransport::digest(Peer& peer) {
    while (peer.socket && !peer.parked_there) {  // bytes behind that belong to the next transport
        if (peer.in_payload) {
            const size_t here = std::min(peer.end - peer.begin, peer.left_bytes);
            if (here > 0 && peer.target) {
                std::memcpy(peer.target, peer.buffer.get() + peer.begin, here);
                peer.target += here;
            }
            peer.begin += here;
            peer.left_bytes -= here;
            if (peer.left_bytes > 0) return;
            end_payload(peer);
            continue;
        }
        if (peer.end - peer.begin < sizeof(Frame)) return;
        std::memcpy(&peer.frame, peer.buffer.get() + peer.begin, sizeof(Frame));
        take(peer, peer.frame);
        peer.begin += sizeof(Frame);
    }
}

// A frame's head. Throws std::bad_alloc; then nothing has changed.
void TcpTransport::take(Peer& peer, const Frame& frame) {
    const auto awaited = std::find_if(peer.awaited.begin(), peer.awaited.end(),
                                      [&](Ticket ticket) { return messages_.at(ticket).tag == frame.tag; });
    std::byte* target = nullptr;
    Ticket receive = 0;
    std::unique_ptr<std::byte[]> copy;
    switch (frame.kind) {
        case Frame::eager:
            if (frame.bytes > kEagerBytes) return lose(peer);
            if (awaited != peer.awaited.end()) {
                Message& its = messages_.at(*awaited);
                receive = *awaited;
                if (frame.bytes <= its.bytes) target = its.to;
                peer.awaited.erase(awaited);
            } else {
                copy.reset(new std::byte[frame.bytes]);
                target = copy.get();
            }
            break;
        case Frame::announce:
            if (awaited != peer.awaited.end()) {
                ask(peer, *awaited, frame);
                peer.awaited.erase(awaited);
            } else {
                peer.early.emplace(frame.tag, Peer::Early{frame, nullptr});
            }
            return;
        case Frame::withdraw: return forget(peer, frame);
        case Frame::ask: {
            const auto found = messages_.find(frame.sender);
            if (found == messages_.end() || found->second.peer != peer.rank) return;  // it is withdrawn
            Out out;
            out.frame = frame;
            out.frame.kind = Frame::payload;
            out.data = found->second.from;
            out.bytes = found->second.bytes;
            out.ticket = frame.sender;
            push(peer, std::move(out));
            return;
        }
        case Frame::payload: {
            const auto found = messages_.find(frame.receiver);
            if (found != messages_.end() && found->second.peer == peer.rank) {
                receive = frame.receiver;
                if (frame.bytes <= found->second.bytes) target = found->second.to;
            }
            break;
        }
        case Frame::notice:
            if (frame.bytes > kNoticeBytes) return lose(peer);
            copy.reset(new std::byte[frame.bytes]);
            target = copy.get();
            break;
        case Frame::word:
            if (frame.bytes > kMostWord) return lose(peer);
            copy.reset(new std::byte[frame.bytes]);
            target = copy.get();
            break;
        case Frame::credit: peer.window += frame.bytes; return;
        case Frame::goodbye: peer.left = true; return;
        case Frame::park:
            peer.parked_there = true;
            epoll_ctl(ready_, EPOLL_CTL_DEL, peer.socket.fd(), nullptr);
            return;
        default: return lose(peer);
    }
    peer.in_payload = true;
    peer.target = target;
    peer.left_bytes = frame.bytes;
    peer.receive = receive;
    peer.copy = std::move(copy);
}

// The sender has taken back a message that it had announced.
void TcpTransport::forget(Peer& peer, const Frame& frame) {
    const auto range = peer.early.equal_range(frame.tag);
    const auto early = std::find_if(range.first, range.second,
                                    [&](const auto& one) { return one.second.frame.sender == frame.sender; });
    if (early != range.second) {
        peer.early.erase(early);
        return;
    }
    // A receive has asked for it: it waits for the next one of its tag.
    const auto asked = std::find_if(messages_.begin(), messages_.end(), [&](const auto& one) {
        return one.second.peer == peer.rank && one.second.asked == frame.sender &&
               one.second.state == Progress::pending;
    });
    if (asked == messages_.end()) return;
    await(peer, asked->first);
    if (asked->second.asked == frame.sender) asked->second.asked = 0;
}

// The payload is here. Throws std::bad_alloc; then nothing has changed.
void TcpTransport::end_payload(Peer& peer) {
    const Frame& frame = peer.frame;
    size_t cost = 0;
    if (frame.kind == Frame::notice || frame.kind == Frame::word) {
        auto& queue = frame.kind == Frame::notice ? notices_ : words_;
        queue.push_back({peer.rank, {peer.copy.get(), peer.copy.get() + frame.bytes}});
    } else if (frame.kind == Frame::eager && peer.copy) {
        // A receive may have been posted since its head came.
        const auto awaited = std::find_if(peer.awaited.begin(), peer.awaited.end(),
                                          [&](Ticket ticket) { return messages_.at(ticket).tag == frame.tag; });
        if (awaited == peer.awaited.end()) {
            peer.early.emplace(frame.tag, Peer::Early{frame, nullptr})->second.payload = std::move(peer.copy);
        } else {
            finish(messages_.at(*awaited), frame.bytes, peer.copy.get());
            peer.awaited.erase(awaited);
            cost = frame.bytes + sizeof(Frame);
        }
    } else {
        const auto found = messages_.find(peer.receive);
        if (peer.receive != 0 && found != messages_.end()) finish(found->second, frame.bytes, nullptr);
        if (frame.kind == Frame::eager) cost = frame.bytes + sizeof(Frame);
    }
    if (cost > 0) give_credit(peer, cost);
    peer.in_payload = false;
    peer.receive = 0;
    peer.target = nullptr;
    peer.copy.reset();
}

Progress TcpTransport::test(Ticket ticket, size_t* received) {
    const auto found = messages_.find(ticket);
    const Progress state = found->second.state;
    *received = found->second.bytes;
    if (state != Progress::pending) messages_.erase(found);
    return state;
}

bool TcpTransport::cancel(Ticket ticket) {
    const auto found = messages_.find(ticket);
    Peer& peer = at(found->second.peer);
    const bool is_announced = found->second.is_announced && found->second.state == Progress::pending;
    const Tag tag = found->second.tag;
    messages_.erase(found);
    peer.awaited.erase(std::remove(peer.awaited.begin(), peer.awaited.end(), ticket), peer.awaited.end());
    if (peer.receive == ticket) peer.target = nullptr;
    const auto out =
        std::find_if(peer.out.begin(), peer.out.end(), [&](const Out& one) { return one.ticket == ticket; });
    try {
        if (out != peer.out.end()) {
            // A message that has begun must go on, but its memory is the caller's again.
            out->copy.reset(new std::byte[out->bytes]);
            if (out->bytes > 0) std::memcpy(out->copy.get(), out->data, out->bytes);
            out->data = out->copy.get();
            out->ticket = 0;
        } else if (is_announced) {
            Out withdraw;
            withdraw.frame.kind = Frame::withdraw;
            withdraw.frame.tag = tag;
            withdraw.frame.sender = ticket;
            push(peer, std::move(withdraw));
        }
    } catch (const std::bad_alloc&) {
        lose(peer);
    }
    return true;
}

void TcpTransport::send_copy(Peer& peer, Frame frame, const void* data, size_t bytes) {
    Out out;
    out.frame = frame;
    out.frame.bytes = bytes;
    out.copy.reset(new std::byte[bytes]);
    if (bytes > 0) std::memcpy(out.copy.get(), data, bytes);
    out.data = out.copy.get();
    out.bytes = bytes;
    push(peer, std::move(out));
}

void TcpTransport::notify(int peer, const void* data, size_t bytes) {
    Frame frame;
    frame.kind = Frame::notice;
    send_copy(at(peer), frame, data, bytes);
}

void TcpTransport::say(int peer, const std::vector<std::byte>& word) {
    Frame frame;
    frame.kind = Frame::word;
    send_copy(at(peer), frame, word.data(), word.size());
}

bool TcpTransport::next_word(int* from, std::vector<std::byte>* word) {
    if (words_.empty()) return false;
    *from = words_.front().from;
    *word = std::move(words_.front().content);
    words_.pop_front();
    return true;
}

void TcpTransport::park(int peer_rank) {
    Peer& peer = at(peer_rank);
    if (std::exchange(peer.parked, true)) return;
    const auto is_void = [](const Out& out) { return out.written == 0 && out.frame.kind != Frame::word; };
    peer.out.erase(std::remove_if(peer.out.begin(), peer.out.end(), is_void), peer.out.end());
    Out out;
    out.frame.kind = Frame::park;
    push(peer, std::move(out));
}

bool TcpTransport::is_parked(int rank) const {
    const Peer& peer = at(rank);
    return peer.socket && peer.parked && peer.parked_there && peer.out.empty();
}

std::vector<TcpStream> TcpTransport::release(const std::vector<int>& ranks) {
    std::vector<TcpStream> streams(ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) {
        if (!is_parked(ranks[i])) continue;
        Peer& peer = at(ranks[i]);
        streams[i].unread.assign(peer.buffer.get() + peer.begin, peer.buffer.get() + peer.end);
        streams[i].socket = std::move(peer.socket);
    }
    return streams;
}

bool TcpTransport::next_notice(Notice* notice) {
    if (notices_.empty()) return false;
    *notice = std::move(notices_.front());
    notices_.pop_front();
    return true;
}

void TcpTransport::close() {
    if (closed_) return;
    const double deadline = seconds_now() + kGoodbyeSeconds;
    for (const auto& peer : peers_) {
        Out out;
        out.frame.kind = Frame::goodbye;
        push(*peer, std::move(out));
    }
    const auto is_busy = [&](const auto& peer) { return !peer->out.empty() && !is_dead(peer->rank); };
    for (Backoff backoff(0, 1e-3); std::any_of(peers_.begin(), peers_.end(), is_busy); backoff.pause()) {
        if (seconds_now() > deadline) break;
        poll();
    }
    poll();  // if a socket is closed with bytes that were not read, the kernel drops bytes that were sent
    closed_ = true;
    for (const auto& peer : peers_) peer->socket.close();
}

}  // namespace ddl
