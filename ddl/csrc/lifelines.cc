#include "lifelines.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <type_traits>

#include "backoff.h"
#include "status.h"

namespace ddl {
namespace {

constexpr uint64_t kMagic = 0x3130656e696c4c44;  // another program's connection is not taken for one of ours

// Opens a connection: the one that connects sends it, the other sends its own back.
struct Hello {
    uint64_t magic = kMagic, token = 0;
    int32_t from = -1, to = -1;
};

}  // namespace

struct Lifelines::Frame {
    enum Kind : uint32_t {
        keep = 1,  // of several connections between two ranks, this one is the lifeline
        goodbye,   // the sender ends in good order
        dead,      // `rank` is, of `cause`
    };
    uint32_t kind = 0, cause = 0;
    int32_t rank = -1;
};

struct Lifelines::Link {
    enum State : uint8_t { connecting, awaits_hello, awaits_keep, up };
    Socket socket;
    int peer = -1;  // of one that we accepted: -1 until its hello
    bool ours = false;
    State state = awaits_hello;
    bool said_goodbye = false;
    std::vector<std::byte> received;

    // Takes what has arrived. False at the end of the connection; `error` then says why, 0 where it was closed.
    bool receive(int* error) {
        std::byte buffer[512];
        for (;;) {
            const ssize_t count = recv(socket.fd(), buffer, sizeof buffer, 0);
            if (count > 0) {
                received.insert(received.end(), buffer, buffer + count);
                continue;
            }
            *error = count == 0 ? 0 : errno;
            if (count < 0 && errno == EINTR) continue;
            return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        }
    }
    template <typename T>
    bool take(T* value) {
        static_assert(std::is_trivially_copyable_v<T>);
        if (received.size() < sizeof *value) return false;
        std::memcpy(value, received.data(), sizeof *value);
        received.erase(received.begin(), received.begin() + sizeof *value);
        return true;
    }
    template <typename T>
    void send(const T& value) const {
        // So little fits the socket's buffer, or the connection is at its end and recv() says so.
        static_cast<void>(::send(socket.fd(), &value, sizeof value, MSG_NOSIGNAL | MSG_DONTWAIT));
    }
};

std::vector<int> lifeline_peers(int rank, int size) {
    std::set<int> peers;
    for (int64_t distance = 1; distance < size; distance *= 2) {
        peers.insert(static_cast<int>((rank + distance) % size));
        peers.insert(static_cast<int>((rank - distance + size) % size));
    }
    return {peers.begin(), peers.end()};
}

Lifelines::Lifelines() : listener_(listen_anywhere(&port_)) {
    if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) {
        throw Error(DDL_ERROR_TRANSPORT, std::string("no pipe for the watching thread: ") + std::strerror(errno));
    }
}

Lifelines::~Lifelines() {
    if (thread_.joinable()) {
        static_cast<void>(!write(wake_[1], "", 1));
        thread_.join();
    }
    for (const int fd : wake_) ::close(fd);
}

std::vector<int> Lifelines::connect(int rank, const std::vector<Contact>& contacts, uint64_t token, double seconds,
                                    std::function<void(int, Death)> on_death) {
    rank_ = rank;
    size_ = static_cast<int>(contacts.size());
    token_ = token;
    on_death_ = std::move(on_death);
    peers_ = lifeline_peers(rank, size_);
    deaths_ = std::make_unique<std::atomic<uint8_t>[]>(contacts.size());
    deadline_ = seconds_now() + seconds;
    std::unique_lock lock(mutex_);
    for (const int peer : peers_) {
        if (peer < rank_) continue;  // the lower one of two connects
        const Contact& contact = contacts[static_cast<size_t>(peer)];
        for (const std::string& address : contact.addresses) {
            auto link = std::make_unique<Link>();
            link->socket = connect_to(address, contact.port);
            link->peer = peer;
            link->ours = true;
            link->state = Link::connecting;
            if (link->socket) links_.push_back(std::move(link));
        }
    }
    thread_ = std::thread([this] { serve(); });
    const auto all_linked = [&] {
        return std::all_of(peers_.begin(), peers_.end(), [&](int peer) { return is_linked(peer); });
    };
    linked_.wait_for(lock, std::chrono::duration<double>(seconds), all_linked);
    std::vector<int> missing;
    for (const int peer : peers_) {
        if (!is_linked(peer)) missing.push_back(peer);
    }
    return missing;
}

bool Lifelines::is_linked(int peer) const {
    const bool linked = std::any_of(links_.begin(), links_.end(),
                                    [&](const auto& link) { return link->peer == peer && link->state == Link::up; });
    return linked || death_of(peer) != Death::none;
}

void Lifelines::serve() {
    constexpr double kRest = 1;  // seconds for which the listener is left alone where descriptors have run out
    std::vector<pollfd> waits;
    for (double listens_from = 0;;) {
        const bool rests = seconds_now() < listens_from;
        waits.assign({{wake_[0], POLLIN, 0}, {rests ? -1 : listener_.fd(), POLLIN, 0}});
        bool connecting = false;
        for (const auto& link : links_) {
            const bool begins = link->state == Link::connecting;
            waits.push_back({link->socket.fd(), static_cast<short>(begins ? POLLOUT : POLLIN), 0});
            connecting |= link->ours && link->state != Link::up;
        }
        // Only this thread changes `links_` itself; what others read of it is guarded below.
        poll(waits.data(), waits.size(), connecting || rests ? 100 : -1);
        if (waits[0].revents != 0) return;
        const std::lock_guard lock(mutex_);
        const bool late = seconds_now() > deadline_;
        for (size_t i = links_.size(); i-- > 0;) {
            const bool keep = waits[i + 2].revents == 0 || advance(*links_[i]);
            const bool expired = late && links_[i]->ours && links_[i]->state != Link::up;
            if (!keep || expired) links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        if (waits[1].revents != 0 && !take_guests()) listens_from = seconds_now() + kRest;
        linked_.notify_all();
    }
}

bool Lifelines::take_guests() {
    // It goes on after connect() has returned: a peer that believes it is connected must not find the line closed.
    while (Socket socket = accept_from(listener_)) {
        auto link = std::make_unique<Link>();
        link->socket = std::move(socket);
        links_.push_back(std::move(link));
    }
    return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
}

bool Lifelines::advance(Link& link) {
    if (link.state == Link::connecting) {
        if (error_of(link.socket) != 0) return false;
        link.send(Hello{kMagic, token_, rank_, link.peer});
        link.state = Link::awaits_hello;
        return true;
    }
    int error = 0;
    const bool open = link.receive(&error);
    if (link.state == Link::awaits_hello && !shake_hands(link)) return false;
    if (link.state >= Link::awaits_keep && !take_frames(link)) return false;
    if (!open && link.state == Link::up && !link.said_goodbye) {
        const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
        mark(link.peer, silent ? Death::silent : Death::ended);
    }
    return open;
}

// False where the other end is not whom it should be: an address may lead to another rank's host.
bool Lifelines::shake_hands(Link& link) {
    Hello hello;
    if (!link.take(&hello)) return true;
    if (hello.magic != kMagic || hello.token != token_ || hello.to != rank_) return false;
    if (link.ours) {
        if (hello.from != link.peer || is_linked(link.peer)) return false;
        link.send(Frame{Frame::keep, 0, rank_});
        establish(link);
        return true;
    }
    if (!std::binary_search(peers_.begin(), peers_.end(), hello.from)) return false;
    link.peer = hello.from;
    link.send(Hello{kMagic, token_, rank_, link.peer});
    link.state = Link::awaits_keep;
    return true;
}

void Lifelines::establish(Link& link) {
    keep_alive(link.socket);
    link.state = Link::up;
    // What was found before this line was up.
    for (int rank = 0; rank < size_; ++rank) {
        const Death cause = death_of(rank);
        if (cause != Death::none) link.send(Frame{Frame::dead, static_cast<uint32_t>(cause), rank});
    }
}

bool Lifelines::take_frames(Link& link) {
    for (Frame frame; link.take(&frame);) {
        switch (frame.kind) {
            case Frame::keep: establish(link); break;
            case Frame::goodbye: link.said_goodbye = true; break;
            case Frame::dead:
                if (frame.rank < 0 || frame.rank >= size_ || frame.rank == rank_) break;
                mark(frame.rank, frame.cause == static_cast<uint32_t>(Death::silent) ? Death::silent : Death::ended);
                break;
            default: return false;
        }
    }
    return true;
}

void Lifelines::mark(int rank, Death cause) {
    if (death_of(rank) != Death::none) return;
    deaths_[static_cast<size_t>(rank)] = static_cast<uint8_t>(cause);
    any_dead_ = true;
    send_all(Frame{Frame::dead, static_cast<uint32_t>(cause), rank});
    if (on_death_) on_death_(rank, cause);
}

void Lifelines::send_all(const Frame& frame) {
    for (const auto& link : links_) {
        if (link->state == Link::up) link->send(frame);
    }
}

void Lifelines::say_goodbye() {
    const std::lock_guard lock(mutex_);
    send_all(Frame{Frame::goodbye, 0, rank_});
}

void Lifelines::close_in_child() {
    ::close(listener_.fd());
    for (const auto& link : links_) ::close(link->socket.fd());
    after_fork();
}

}  // namespace ddl
