#include "transport/heartbeats.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/backoff.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr double kSilenceSeconds = 15;  // for which a rank counts as silent that was found so
// A goodbye waits at most so long for connections that the other end may already use.
constexpr double kGoodbyeSeconds = 1;

}  // namespace

std::vector<int> heartbeat_peers(int rank, int size) {
    std::set<int> peers;
    for (int64_t distance = 1; distance < size; distance *= 2) {
        peers.insert(static_cast<int>((rank + distance) % size));
        peers.insert(static_cast<int>((rank - distance + size) % size));
    }
    return {peers.begin(), peers.end()};
}

void Heartbeats::Link::send(const Frame& one) const {
    // So little fits the socket's buffer, or the connection is at its end and recv() says so.
    static_cast<void>(::send(socket.fd(), &one, sizeof one, MSG_NOSIGNAL));
}

Heartbeats::Heartbeats(int rank, int size)
    : rank_(rank),
      size_(size),
      peers_(heartbeat_peers(rank, size)),
      wake_([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }),
      connector_(rank, size),
      silent_since_(static_cast<size_t>(size)),
      deaths_(std::make_unique<std::atomic<uint8_t>[]>(static_cast<size_t>(size))) {
    if (!wake_) throw Error(DDL_ERROR_TRANSPORT, std::string("eventfd: ") + std::strerror(errno));
}

Heartbeats::~Heartbeats() {
    if (!thread_.joinable()) return;
    eventfd_write(wake_.fd(), 1);
    thread_.join();
}

std::vector<int> Heartbeats::connect(std::vector<std::string> contacts, std::string token, double seconds,
                                     std::function<void(int, Death)> on_death) {
    on_death_ = std::move(on_death);
    deadline_ = seconds_now() + seconds;
    std::unique_lock lock(mutex_);
    connector_.set_token(std::move(token));
    connector_.know(std::move(contacts));
    connector_.let_in();
    for (const int peer : peers_) {
        if (peer > rank_) connector_.want(peer);  // the lower one of two connects
    }
    thread_ = std::thread([this] { serve(); });
    std::vector<int> missing;
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
        const auto is_missing = [&](int peer) {
            return !connector_.is_connected(peer) && death_of(peer) == Death::none;
        };
        missing.clear();
        std::copy_if(peers_.begin(), peers_.end(), std::back_inserter(missing), is_missing);
        return missing.empty();
    });
    return missing;
}

void Heartbeats::serve() {
    constexpr size_t kOthers = 2;  // descriptors that come before the links
    for (std::vector<pollfd> waits;;) {
        std::unique_lock lock(mutex_);
        // Only this thread changes `links_` itself, so that they are those that were waited for.
        for (size_t i = waits.size(); i-- > kOthers;) {
            const auto link = links_.begin() + static_cast<std::ptrdiff_t>(i - kOthers);
            if (waits[i].revents != 0 && !advance(*link)) links_.erase(link);
        }
        // Others may still connect: a peer that believes it is connected must not find the line closed.
        if (seconds_now() > deadline_) connector_.give_up();
        connector_.serve(0);
        for (Connector::News news; connector_.next(&news);) {
            if (news.kind == Connector::News::connected) establish(std::move(news));
        }
        changed_.notify_all();
        waits.assign({{wake_.fd(), POLLIN, 0}, {connector_.ready(), POLLIN, 0}});
        for (const Link& link : links_) waits.push_back({link.socket.fd(), POLLIN, 0});
        const bool is_busy = connector_.is_busy();
        lock.unlock();
        poll(waits.data(), waits.size(), is_busy ? 100 : -1);
        if (waits[0].revents != 0) return;
    }
}

void Heartbeats::establish(Connector::News news) {
    Link link;
    link.socket = std::move(news.socket);
    link.peer = news.peer;
    end_if_unanswered(link.socket);
    if (leaves_) link.send({Frame::goodbye, 0, rank_});
    // Deaths that were found before this connection was up.
    for (int rank = 0; rank < size_; ++rank) {
        const Death cause = death_of(rank);
        if (cause != Death::none) link.send({Frame::dead, static_cast<uint32_t>(cause), rank});
    }
    links_.push_back(std::move(link));
}

bool Heartbeats::advance(Link& link) {
    const ssize_t count = recv(link.socket.fd(), reinterpret_cast<char*>(&link.frame) + link.received,
                               sizeof link.frame - link.received, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (count <= 0) {
        if (!link.said_goodbye) mark(link.peer, was_silent(link.socket) ? Death::silent : Death::ended);
        return false;
    }
    link.received += static_cast<size_t>(count);
    if (link.received == sizeof link.frame) take_frame(link);
    return true;
}

void Heartbeats::take_frame(Link& link) {
    link.received = 0;
    const int rank = link.frame.rank;
    const bool is_other = rank >= 0 && rank < size_ && rank != rank_;
    switch (link.frame.kind) {
        case Frame::goodbye: link.said_goodbye = true; break;
        case Frame::dead:
            if (!is_other) break;
            mark(rank, link.frame.cause == static_cast<uint32_t>(Death::silent) ? Death::silent : Death::ended);
            break;
        case Frame::ask: link.send({Frame::answer, 0, rank_}); break;
        case Frame::answer: answered_.insert(link.peer); break;
        case Frame::silent:
            if (is_other) note_silence(rank);
            break;
        default: break;
    }
}

void Heartbeats::mark(int rank, Death cause) {
    if (death_of(rank) != Death::none) return;
    deaths_[static_cast<size_t>(rank)] = static_cast<uint8_t>(cause);
    any_dead_ = true;
    send_all({Frame::dead, static_cast<uint32_t>(cause), rank});
    if (on_death_ && !leaves_) on_death_(rank, cause);
}

// Tells the peers, too, unless it is old news.
void Heartbeats::note_silence(int rank) {
    double& since = silent_since_[static_cast<size_t>(rank)];
    const double now = seconds_now();
    if (since != 0 && now - since < kSilenceSeconds / 2) return;
    since = now;
    send_all({Frame::silent, 0, rank});
}

std::vector<int> Heartbeats::silent(double seconds) {
    const auto patience = std::chrono::duration<double>(seconds);
    const auto end = std::chrono::steady_clock::now() + 2 * patience;
    std::unique_lock lock(mutex_);
    answered_.clear();
    send_all({Frame::ask, 0, rank_});
    const auto is_quiet = [&](const Link& link) { return !link.said_goodbye && answered_.count(link.peer) == 0; };
    changed_.wait_for(lock, patience, [&] { return std::none_of(links_.begin(), links_.end(), is_quiet); });
    for (const Link& link : links_) {
        if (is_quiet(link)) note_silence(link.peer);
        if (answered_.count(link.peer) == 1) silent_since_[static_cast<size_t>(link.peer)] = 0;
    }
    lock.unlock();
    std::this_thread::sleep_until(end);  // others wait as long for their peers, and then tell of them
    lock.lock();
    std::vector<int> found;
    const double now = seconds_now();
    for (int rank = 0; rank < size_; ++rank) {
        const double since = silent_since_[static_cast<size_t>(rank)];
        if (since != 0 && now - since < kSilenceSeconds) found.push_back(rank);
    }
    return found;
}

void Heartbeats::send_all(const Frame& frame) const {
    for (const Link& link : links_) link.send(frame);
}

void Heartbeats::say_goodbye() {
    std::unique_lock lock(mutex_);
    leaves_ = true;
    connector_.leave();
    send_all({Frame::goodbye, 0, rank_});
    // The other end may already use a connection that is not up here yet: it must hear the goodbye, too.
    changed_.wait_for(lock, std::chrono::duration<double>(kGoodbyeSeconds), [&] {
        return std::none_of(peers_.begin(), peers_.end(), [&](int peer) { return connector_.is_promised(peer); });
    });
}

}  // namespace ddl
