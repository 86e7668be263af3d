#include "transport/heartbeats.h"

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

#include "base/backoff.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr uint64_t kMagic = 0x3130656e696c4c44;  // another program's connection is not taken for one of ours

// Anybody who reaches the port can connect and say anything, or nothing.
constexpr double kGreetingSeconds = 5;  // in which a new connection must say hello
constexpr size_t kStrangers = 64;       // beyond the peers, so many may be about to say it
constexpr int kGuestsAtOnce = 64;       // are taken before the other connections have their turn

constexpr double kSilenceSeconds = 15;  // for which a rank counts as silent that was found so

// Opens a connection: the one that connects sends it, the other sends its own back.
struct Hello {
    uint64_t magic = kMagic, token = 0;
    int32_t from = -1, to = -1;
};

}  // namespace

struct Heartbeats::Frame {
    enum Kind : uint32_t {
        keep = 1,  // of several connections between two ranks, this one is the heartbeat
        goodbye,   // the sender ends in good order
        dead,      // `rank` is, of `cause`
        ask,       // the sender wants an answer
        answer,    // here it is
        silent,    // `rank` does not answer
    };
    uint32_t kind = 0, cause = 0;
    int32_t rank = -1;
};

struct Heartbeats::Link {
    enum State : uint8_t { connecting, awaits_hello, awaits_keep, up };
    Socket socket;
    int peer = -1;  // of one that we accepted: -1 until its hello
    bool ours = false;
    State state = awaits_hello;
    bool said_goodbye = false;
    double since = seconds_now();
    std::vector<std::byte> received;

    // An unauthenticated connection: its hello has not arrived yet.
    bool is_stranger() const { return peer < 0; }

    // Takes a bounded piece of what has arrived, and before the hello no more than that. False at the end of the
    // connection.
    bool receive() {
        std::byte buffer[512];
        const size_t most = state == awaits_hello ? sizeof(Hello) - received.size() : sizeof buffer;
        const ssize_t count = recv(socket.fd(), buffer, most, 0);
        if (count > 0) received.insert(received.end(), buffer, buffer + count);
        return count > 0 || (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
    }
    // False if the bytes received so far cannot begin a hello of this program. The token is not checked here: an
    // attacker who learnt which of its bytes are right could find them one by one.
    bool may_be_hello() const {
        if (received.empty()) return true;  // data() may be null then, which memcmp must not be given
        const uint64_t magic = kMagic;
        return std::memcmp(received.data(), &magic, std::min(received.size(), sizeof magic)) == 0;
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

std::vector<int> heartbeat_peers(int rank, int size) {
    std::set<int> peers;
    for (int64_t distance = 1; distance < size; distance *= 2) {
        peers.insert(static_cast<int>((rank + distance) % size));
        peers.insert(static_cast<int>((rank - distance + size) % size));
    }
    return {peers.begin(), peers.end()};
}

Heartbeats::Heartbeats(const std::vector<std::string>& addresses) : door_(open_door(addresses)) {
    if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) {
        throw Error(DDL_ERROR_TRANSPORT, std::string("no pipe for the watching thread: ") + std::strerror(errno));
    }
}

Heartbeats::~Heartbeats() {
    if (thread_.joinable()) {
        static_cast<void>(!write(wake_[1], "", 1));
        thread_.join();
    }
    for (const int fd : wake_) ::close(fd);
}

std::vector<int> Heartbeats::connect(int rank, const std::vector<Contact>& contacts, uint64_t token, double seconds,
                                     std::function<void(int, Death)> on_death) {
    rank_ = rank;
    size_ = static_cast<int>(contacts.size());
    token_ = token;
    on_death_ = std::move(on_death);
    peers_ = heartbeat_peers(rank, size_);
    deaths_ = std::make_unique<std::atomic<uint8_t>[]>(contacts.size());
    silent_since_.assign(contacts.size(), 0);
    deadline_ = seconds_now() + seconds;
    std::unique_lock lock(mutex_);
    for (const int peer : peers_) {
        if (peer < rank_) continue;  // the lower one of two connects
        for (const Endpoint& endpoint : contacts[static_cast<size_t>(peer)]) {
            for (const std::string& address : ways_to(endpoint)) {
                auto link = std::make_unique<Link>();
                link->socket = connect_to(address, endpoint.port);
                link->peer = peer;
                link->ours = true;
                link->state = Link::connecting;
                if (link->socket) links_.push_back(std::move(link));
            }
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

bool Heartbeats::is_linked(int peer) const {
    const bool linked = std::any_of(links_.begin(), links_.end(),
                                    [&](const auto& link) { return link->peer == peer && link->state == Link::up; });
    return linked || death_of(peer) != Death::none;
}

void Heartbeats::serve() {
    constexpr double kRest = 1;  // seconds for which the listener is left alone after descriptors have run out
    std::vector<pollfd> waits;
    for (double listens_from = 0;;) {
        const bool rests = seconds_now() < listens_from;
        waits.assign({{wake_[0], POLLIN, 0}});
        for (const Socket& listener : door_.listeners) waits.push_back({rests ? -1 : listener.fd(), POLLIN, 0});
        const size_t first = waits.size();
        bool hurries = rests;
        for (const auto& link : links_) {
            const bool begins = link->state == Link::connecting;
            waits.push_back({link->socket.fd(), static_cast<short>(begins ? POLLOUT : POLLIN), 0});
            hurries |= (link->ours && link->state != Link::up) || link->is_stranger();
        }
        // Only this thread changes `links_` itself. The lock below guards it, because others read it.
        poll(waits.data(), waits.size(), hurries ? 100 : -1);
        if (waits[0].revents != 0) return;
        const std::lock_guard lock(mutex_);
        const double now = seconds_now();
        for (size_t i = links_.size(); i-- > 0;) {
            const bool keep = waits[first + i].revents == 0 || advance(*links_[i]);
            const bool expired = now > deadline_ && links_[i]->ours && links_[i]->state != Link::up;
            if (!keep || expired) links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        for (size_t i = 0; i < door_.listeners.size(); ++i) {
            if (waits[1 + i].revents != 0 && !take_guests(door_.listeners[i])) listens_from = now + kRest;
        }
        drop_guests(now);
        linked_.notify_all();
    }
}

bool Heartbeats::take_guests(const Socket& listener) {
    // It goes on after connect() has returned: a peer that believes it is connected must not find the line closed.
    for (int i = 0; i < kGuestsAtOnce; ++i) {
        Socket socket = accept_from(listener);
        if (!socket) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
        auto link = std::make_unique<Link>();
        link->socket = std::move(socket);
        links_.push_back(std::move(link));
    }
    return true;
}

// Drops connections that have been silent for too long, and the oldest of too many: a peer says hello at once.
void Heartbeats::drop_guests(double now) {
    const auto strangers = static_cast<size_t>(
        std::count_if(links_.begin(), links_.end(), [](const auto& link) { return link->is_stranger(); }));
    const size_t most = peers_.size() + kStrangers;
    size_t surplus = strangers > most ? strangers - most : 0;
    const auto is_unwelcome = [&](const auto& link) {
        if (!link->is_stranger()) return false;
        if (surplus > 0) return surplus-- > 0;
        return now - link->since > kGreetingSeconds;
    };
    // In order, which std::remove_if keeps.
    links_.erase(std::remove_if(links_.begin(), links_.end(), is_unwelcome), links_.end());
}

bool Heartbeats::advance(Link& link) {
    if (link.state == Link::connecting) {
        if (error_of(link.socket) != 0) return false;
        link.send(Hello{kMagic, token_, rank_, link.peer});
        link.state = Link::awaits_hello;
        return true;
    }
    const bool open = link.receive();
    if (link.state == Link::awaits_hello && !shake_hands(link)) return false;
    if (link.state >= Link::awaits_keep && !take_frames(link)) return false;
    if (!open && link.state == Link::up && !link.said_goodbye) {
        mark(link.peer, was_silent(link.socket) ? Death::silent : Death::ended);
    }
    return open;
}

// False if the other end is not the rank that was meant: an address may lead to another rank's host.
bool Heartbeats::shake_hands(Link& link) {
    if (!link.may_be_hello()) return false;
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
    if (leaves_) link.send(Frame{Frame::goodbye, 0, rank_});
    link.state = Link::awaits_keep;
    return true;
}

void Heartbeats::establish(Link& link) {
    keep_alive(link.socket);
    end_if_unanswered(link.socket);
    link.state = Link::up;
    if (leaves_) link.send(Frame{Frame::goodbye, 0, rank_});
    // Deaths that were found before this connection was up.
    for (int rank = 0; rank < size_; ++rank) {
        const Death cause = death_of(rank);
        if (cause != Death::none) link.send(Frame{Frame::dead, static_cast<uint32_t>(cause), rank});
    }
}

bool Heartbeats::take_frames(Link& link) {
    for (Frame frame; link.take(&frame);) {
        switch (frame.kind) {
            case Frame::keep: establish(link); break;
            case Frame::goodbye: link.said_goodbye = true; break;
            case Frame::dead:
                if (frame.rank < 0 || frame.rank >= size_ || frame.rank == rank_) break;
                mark(frame.rank, frame.cause == static_cast<uint32_t>(Death::silent) ? Death::silent : Death::ended);
                break;
            case Frame::ask: link.send(Frame{Frame::answer, 0, rank_}); break;
            case Frame::answer: answered_.insert(link.peer); break;
            case Frame::silent:
                if (frame.rank >= 0 && frame.rank < size_ && frame.rank != rank_) note_silence(frame.rank);
                break;
            default: return false;
        }
    }
    return true;
}

void Heartbeats::mark(int rank, Death cause) {
    if (death_of(rank) != Death::none) return;
    deaths_[static_cast<size_t>(rank)] = static_cast<uint8_t>(cause);
    any_dead_ = true;
    send_all(Frame{Frame::dead, static_cast<uint32_t>(cause), rank});
    if (on_death_ && !leaves_) on_death_(rank, cause);
}

// Tells the peers, too, unless it is old news.
void Heartbeats::note_silence(int rank) {
    double& since = silent_since_[static_cast<size_t>(rank)];
    const double now = seconds_now();
    if (since != 0 && now - since < kSilenceSeconds / 2) return;
    since = now;
    send_all(Frame{Frame::silent, 0, rank});
}

std::vector<int> Heartbeats::silent(double seconds) {
    const auto patience = std::chrono::duration<double>(seconds);
    const auto end = std::chrono::steady_clock::now() + 2 * patience;
    std::unique_lock lock(mutex_);
    answered_.clear();
    send_all(Frame{Frame::ask, 0, rank_});
    const auto is_quiet = [&](const auto& link) {
        return link->state == Link::up && !link->said_goodbye && answered_.count(link->peer) == 0;
    };
    linked_.wait_for(lock, patience, [&] { return std::none_of(links_.begin(), links_.end(), is_quiet); });
    for (const auto& link : links_) {
        if (is_quiet(link)) note_silence(link->peer);
        if (answered_.count(link->peer) == 1) silent_since_[static_cast<size_t>(link->peer)] = 0;
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

void Heartbeats::send_all(const Frame& frame) {
    for (const auto& link : links_) {
        if (link->state == Link::up) link->send(frame);
    }
}

void Heartbeats::say_goodbye() {
    const std::lock_guard lock(mutex_);
    leaves_ = true;
    for (const auto& link : links_) {  // the other end may take a connection for up that is not yet up here
        if (link->state >= Link::awaits_keep) link->send(Frame{Frame::goodbye, 0, rank_});
    }
}

}  // namespace ddl
