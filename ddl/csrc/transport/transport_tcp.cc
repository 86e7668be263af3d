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
constexpr size_t kBuffer = 32 << 10;        // what one read takes, but for long payloads
constexpr size_t kMostWord = 64 << 10;
constexpr double kGoodbyeSeconds = 2;  // for which close() lets the rest leave
constexpr int kEvents = 64;

}  // namespace

struct TcpTransport::Frame {
    enum Kind : uint32_t { eager = 1, announce, ask, payload, notice, credit, goodbye, word, park };
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
    size_t bytes = 0;  // of a send: its length; of a receive: its capacity, then what it received
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
    size_t window = kEagerWindow;  // eager bytes that may still be sent
    size_t consumed = 0;           // eager bytes to give back
    std::deque<Ticket> awaited;
    std::map<Tag, std::deque<Early>> early;
    // Reading: what has come but was not looked at, and the payload that is arriving.
    std::vector<std::byte> buffer = std::vector<std::byte>(kBuffer);
    size_t begin = 0, end = 0;
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
        std::copy(streams[i].unread.begin(), streams[i].unread.end(), peer.buffer.begin());
        peer.end = streams[i].unread.size();
        keep_alive(peer.socket);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = i;
        if (epoll_ctl(ready_, EPOLL_CTL_ADD, peer.socket.fd(), &event) != 0) {
            throw Error(DDL_ERROR_TRANSPORT, std::string("epoll_ctl: ") + std::strerror(errno));
        }
        read_buffer(peer);
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
    messages_.emplace(ticket, message);
    Out out;
    out.frame.tag = tag;
    out.frame.bytes = bytes;
    out.frame.sender = ticket;
    const size_t cost = bytes + sizeof(Frame);
    const bool at_once = bytes <= kEagerBytes && cost <= peer.window;
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
    const auto found = peer.early.find(tag);
    if (found == peer.early.end()) {
        messages_.emplace(ticket, message);
        try {
            peer.awaited.push_back(ticket);
        } catch (const std::bad_alloc&) {
            messages_.erase(ticket);
            throw;
        }
        return ticket;
    }
    Peer::Early& early = found->second.front();
    const bool fits = early.frame.bytes <= capacity;
    if (early.frame.kind == Frame::eager) {
        if (fits && early.frame.bytes > 0) std::memcpy(message.to, early.payload.get(), early.frame.bytes);
        message.state = fits ? Progress::done : Progress::failed;
        message.bytes = early.frame.bytes;
        messages_.emplace(ticket, message);
    } else {
        messages_.emplace(ticket, message);
        Out ask;
        ask.frame = early.frame;
        ask.frame.kind = Frame::ask;
        ask.frame.receiver = ticket;
        try {
            push(peer, std::move(ask));
        } catch (const std::bad_alloc&) {
            messages_.erase(ticket);
            throw;
        }
    }
    const size_t cost = early.frame.kind == Frame::eager ? early.frame.bytes + sizeof(Frame) : 0;
    found->second.pop_front();
    if (found->second.empty()) peer.early.erase(found);
    if (cost > 0) give_credit(peer, cost);
    return ticket;
}

void TcpTransport::give_credit(Peer& peer, size_t bytes) {
    peer.consumed += bytes;
    if (peer.consumed < kEagerWindow / 4) return;
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
    }
    epoll_event events[kEvents];
    const int count = epoll_wait(ready_, events, kEvents, 0);
    for (int i = 0; i < count; ++i) hear(*peers_[events[i].data.u64]);
}

void TcpTransport::hear(Peer& peer) noexcept {
    for (bool more = true; more && peer.socket && !peer.parked_there;) {
        const bool direct = peer.in_payload && peer.begin == peer.end && peer.target && peer.left_bytes >= kBuffer;
        if (!direct && peer.begin == peer.end) peer.begin = peer.end = 0;
        if (!direct && peer.begin > 0 && peer.begin < peer.end) {
            std::memmove(peer.buffer.data(), peer.buffer.data() + peer.begin, peer.end - peer.begin);
            peer.end -= std::exchange(peer.begin, 0);
        }
        void* const to = direct ? peer.target : peer.buffer.data() + peer.end;
        const size_t room = direct ? peer.left_bytes : peer.buffer.size() - peer.end;
        ssize_t count = 0;
        if (room > 0) {
            count = recv(peer.socket.fd(), to, room, MSG_DONTWAIT);
            if (count == 0) return lose(peer, true);
            if (count < 0) {
                if (errno == EINTR) continue;
                if (errno != EAGAIN && errno != EWOULDBLOCK) return lose(peer);
                return;
            }
        }
        more = static_cast<size_t>(count) == room;
        try {
            if (direct) {
                peer.target += count;
                peer.left_bytes -= static_cast<size_t>(count);
                if (peer.left_bytes == 0) end_payload(peer);
                continue;
            }
            peer.end += static_cast<size_t>(count);
            read_buffer(peer);
        } catch (const std::bad_alloc&) {
            return;  // what could not be taken stays in the buffer, and is tried again when more comes
        }
    }
}

// Takes what is in the buffer, but for an incomplete head. Throws std::bad_alloc.
void TcpTransport::read_buffer(Peer& peer) {
    while (!peer.parked_there) {  // what follows that is the next transport's
        if (peer.in_payload) {
            const size_t here = std::min(peer.end - peer.begin, peer.left_bytes);
            if (here > 0 && peer.target) {
                std::memcpy(peer.target, peer.buffer.data() + peer.begin, here);
                peer.target += here;
            }
            peer.begin += here;
            peer.left_bytes -= here;
            if (peer.left_bytes > 0) return;
            end_payload(peer);
            continue;
        }
        if (peer.end - peer.begin < sizeof(Frame)) return;
        std::memcpy(&peer.frame, peer.buffer.data() + peer.begin, sizeof(Frame));
        take(peer, peer.frame);
        if (!peer.socket) return;
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
                Out ask;
                ask.frame = frame;
                ask.frame.kind = Frame::ask;
                ask.frame.receiver = *awaited;
                push(peer, std::move(ask));
                if (peer.socket) peer.awaited.erase(awaited);
            } else {
                peer.early[frame.tag].push_back({frame, nullptr});
            }
            return;
        case Frame::ask: {
            const auto found = messages_.find(frame.sender);
            if (found == messages_.end() || found->second.peer != peer.rank) return;  // it was taken back
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

void TcpTransport::end_payload(Peer& peer) {
    const Frame& frame = peer.frame;
    if (frame.kind == Frame::notice || frame.kind == Frame::word) {
        auto& queue = frame.kind == Frame::notice ? notices_ : words_;
        queue.push_back({peer.rank, {peer.copy.get(), peer.copy.get() + frame.bytes}});
    } else if (frame.kind == Frame::eager && peer.copy) {
        // A receive may have been posted since its head came.
        const auto awaited = std::find_if(peer.awaited.begin(), peer.awaited.end(),
                                          [&](Ticket ticket) { return messages_.at(ticket).tag == frame.tag; });
        if (awaited == peer.awaited.end()) {
            peer.early[frame.tag].push_back({frame, std::move(peer.copy)});
        } else {
            Message& its = messages_.at(*awaited);
            const bool fits = frame.bytes <= its.bytes;
            if (fits && frame.bytes > 0) std::memcpy(its.to, peer.copy.get(), frame.bytes);
            its.bytes = frame.bytes;
            its.state = fits ? Progress::done : Progress::failed;
            peer.awaited.erase(awaited);
            give_credit(peer, frame.bytes + sizeof(Frame));
        }
    } else if (const auto found = messages_.find(peer.receive); peer.receive != 0 && found != messages_.end()) {
        const bool fits = frame.bytes <= found->second.bytes;
        found->second.bytes = frame.bytes;
        found->second.state = fits ? Progress::done : Progress::failed;
    }
    if (frame.kind == Frame::eager && peer.receive != 0) give_credit(peer, frame.bytes + sizeof(Frame));
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
    messages_.erase(found);
    peer.awaited.erase(std::remove(peer.awaited.begin(), peer.awaited.end(), ticket), peer.awaited.end());
    if (peer.receive == ticket) peer.target = nullptr;
    for (auto out = peer.out.begin(); out != peer.out.end(); ++out) {
        if (out->ticket != ticket) continue;
        // The rest of what is announced must follow, and is the caller's no more.
        std::byte* const rest = new (std::nothrow) std::byte[out->bytes];
        if (!rest) {
            lose(peer);
            break;
        }
        if (out->bytes > 0) std::memcpy(rest, out->data, out->bytes);
        out->copy.reset(rest);
        out->data = rest;
        out->ticket = 0;
        break;
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
        const auto unread = peer.buffer.begin() + static_cast<std::ptrdiff_t>(peer.begin);
        streams[i].unread.assign(unread, peer.buffer.begin() + static_cast<std::ptrdiff_t>(peer.end));
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
    poll();  // what was not read would make the kernel drop what was sent
    closed_ = true;
    for (const auto& peer : peers_) peer->socket.close();
}

}  // namespace ddl
