#include "transport/tcp_connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace ddl {
namespace {

constexpr size_t kBuffer = 32 << 10;  // most bytes of one read, except of long payloads

bool has_payload(uint32_t kind) {
    return kind == TcpFrame::eager || kind == TcpFrame::payload || kind == TcpFrame::notice || kind == TcpFrame::word ||
           kind == TcpFrame::park;
}

TcpConnection::Out mark_of(const std::vector<std::byte>& farewell) {
    TcpFrame frame;
    frame.kind = TcpFrame::park;
    return TcpConnection::copy_of(frame, farewell.data(), farewell.size());
}

}  // namespace

TcpConnection::Out TcpConnection::copy_of(TcpFrame frame, const void* data, size_t bytes) {
    Out out;
    out.frame = frame;
    out.frame.bytes = out.bytes = bytes;
    out.copy.reset(new std::byte[bytes]);
    if (bytes > 0) std::memcpy(out.copy.get(), data, bytes);
    out.data = out.copy.get();
    return out;
}

void TcpConnection::open(Socket socket, bool was_heard) {
    was_heard_ = was_heard;
    buffer_.reset(new std::byte[kBuffer]);
    socket_ = std::move(socket);
}

void TcpConnection::close() {
    socket_.close();
    out_.clear();
}

void TcpConnection::lose(Owner& owner, bool ended) noexcept {
    const bool was_there = !was_silent(socket_);
    close();
    owner.lost(ended && was_there, was_there && !was_heard_);
}

void TcpConnection::flush(Owner& owner) noexcept {
    while (!out_.empty() && socket_) {
        Out& out = out_.front();
        const size_t head = out.written < sizeof out.frame ? sizeof out.frame - out.written : 0;
        const size_t past = out.written > sizeof out.frame ? out.written - sizeof out.frame : 0;
        iovec parts[2] = {{reinterpret_cast<std::byte*>(&out.frame) + sizeof out.frame - head, head},
                          {const_cast<std::byte*>(out.data) + past, out.bytes - past}};
        msghdr message{};
        message.msg_iov = head > 0 ? parts : parts + 1;
        message.msg_iovlen = (head > 0 ? 1u : 0u) + (parts[1].iov_len > 0 ? 1u : 0u);
        const ssize_t sent = sendmsg(socket_.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) continue;
            // If it is over, hear() says so, once it has read what came before: it may be a goodbye.
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) out_.clear();
            return;
        }
        out.written += static_cast<size_t>(sent);
        if (out.written < sizeof out.frame + out.bytes) continue;
        if (out.ticket != 0) owner.sent(out.ticket);
        out_.pop_front();
    }
}

void TcpConnection::hear(Owner& owner) noexcept {
    try {
        bool more = true;
        digest(owner);
        while (more && socket_ && !parked_there_) {
            more = read(owner);
            digest(owner);
        }
        is_stuck_ = false;
    } catch (const std::bad_alloc&) {
        is_stuck_ = true;
    }
}

// Reads once: a long payload straight to its place. False if nothing more is there now.
bool TcpConnection::read(Owner& owner) {
    const bool direct = in_payload_ && in_.target && left_bytes_ >= kBuffer;  // the buffer is empty then
    if (!direct && begin_ > 0) {
        std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
        end_ -= std::exchange(begin_, 0);
    }
    void* const to = direct ? in_.target : buffer_.get() + end_;
    const size_t room = direct ? left_bytes_ : kBuffer - end_;
    const ssize_t count = recv(socket_.fd(), to, room, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) return true;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (count <= 0) {
        // A process that ends before it has read all resets the connection. So may others, but not inside a host.
        lose(owner, count == 0 || (errno == ECONNRESET && is_local(socket_)));
        return false;
    }
    if (direct) {
        in_.target += count;
        left_bytes_ -= static_cast<size_t>(count);
    } else {
        end_ += static_cast<size_t>(count);
    }
    return static_cast<size_t>(count) == room;
}

// Takes frames and payloads from the buffer. Throws std::bad_alloc; the rest is taken the next time.
void TcpConnection::digest(Owner& owner) {
    while (socket_ && !parked_there_) {  // bytes behind that belong to the next epoch
        if (in_payload_) {
            const size_t here = std::min(end_ - begin_, left_bytes_);
            if (here > 0 && in_.target) {
                std::memcpy(in_.target, buffer_.get() + begin_, here);
                in_.target += here;
            }
            begin_ += here;
            left_bytes_ -= here;
            if (left_bytes_ > 0) return;
            const bool is_mark = frame_.kind == TcpFrame::park;
            if (stale_ == 0) {
                owner.end(frame_, in_);
                parked_there_ = is_mark;
            } else if (is_mark) {
                --stale_;
            }
            in_payload_ = false;
            in_ = {};
            continue;
        }
        if (end_ - begin_ < sizeof frame_) return;
        std::memcpy(&frame_, buffer_.get() + begin_, sizeof frame_);
        was_heard_ = true;
        const bool is_heeded = stale_ == 0 || frame_.kind == TcpFrame::goodbye;
        if (is_heeded && !owner.begin(frame_, &in_)) return lose(owner, false);
        begin_ += sizeof frame_;
        in_payload_ = has_payload(frame_.kind);
        left_bytes_ = frame_.bytes;
    }
}

bool TcpConnection::forget(Ticket ticket) {
    if (in_.receive == ticket) in_.target = nullptr;
    const auto out = std::find_if(out_.begin(), out_.end(), [&](const Out& one) { return one.ticket == ticket; });
    if (out == out_.end()) return false;
    out->copy.reset(new std::byte[out->bytes]);
    if (out->bytes > 0) std::memcpy(out->copy.get(), out->data, out->bytes);
    out->data = out->copy.get();
    out->ticket = 0;
    return true;
}

void TcpConnection::park(const std::vector<std::byte>& farewell) {
    if (std::exchange(parked_, true)) return;
    const auto is_void = [](const Out& out) { return out.written == 0 && out.frame.kind != TcpFrame::word; };
    out_.erase(std::remove_if(out_.begin(), out_.end(), is_void), out_.end());
    for (Out& out : out_) out.ticket = 0;
    push(mark_of(farewell));
}

void TcpConnection::follow(const std::vector<std::vector<std::byte>>& farewells) {
    stale_ = static_cast<uint32_t>(farewells.size());
    for (auto its = farewells.rbegin(); its != farewells.rend(); ++its) out_.push_front(mark_of(*its));
}

void TcpConnection::renew() {
    if (!parked_) return;
    if (!parked_there_) ++stale_;
    parked_ = parked_there_ = false;
    in_.target = nullptr;
}

}  // namespace ddl
