#include "transport/connector.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/backoff.h"
#include "base/random_number.h"
#include "base/sha256.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr uint64_t kMagic = 0x33706374206c6464;
constexpr double kGuestSeconds = 2;    // in which a connection must say whose it is
constexpr double kWaySeconds = 4;      // in which an address must lead somewhere
constexpr double kAnswerSeconds = 20;  // in which a rank must go on that is connected: it may have much to do
constexpr size_t kMostGuests = 64;     // beyond the ranks, at once
constexpr double kRestSeconds = 1;     // for which nobody is let in after descriptors have run out
constexpr uint64_t kDoors = 1 << 10;   // numbers below are listening sockets in the epoll, those above are links
constexpr double kRetrySeconds = 0.2;  // between two tries of a connection
constexpr size_t kMostTries = 32;  // at once: with hundreds of ranks a host has too much to do to answer all in time
// After which an address most likely leads nowhere, and its try gives no host anything to do.
constexpr double kTrySeconds = 0.25;
// For which every try must fail before a rank counts as gone. Its heartbeats, if there are any, say more, and earlier.
// What refuses may also be a firewall, for a moment. A kernel does not answer for a process that is stopped if too many
// wait for it to accept them: no answer only means something if the network to its host is cut, and then after as long
// as for keep_alive().
constexpr double kRefusedSeconds = 5, kCutSeconds = 4.5;
constexpr double kUnansweredSeconds = 1;  // for is_unanswered()

struct Hello {
    uint64_t magic = kMagic;
    int32_t from = -1, to = -1;
    uint64_t epoch = 0;
    uint64_t nonce[2] = {};
};
struct Answer {
    uint64_t nonce[2] = {};
    Digest proof{};
};

Digest prove(const std::string& token, char side, const Hello& hello, const uint64_t (&nonce)[2]) {
    std::string text(1, side);
    text.append(reinterpret_cast<const char*>(&hello), sizeof hello);
    text.append(reinterpret_cast<const char*>(nonce), sizeof nonce);
    return hmac_sha256(token, text);
}

template <typename T>
bool send_small(const Socket& socket, const T& value) {
    return send(socket.fd(), &value, sizeof value, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof value);
}

}  // namespace

struct Connector::Link {
    enum State { connecting, awaits_answer, awaits_keep, awaits_hello, awaits_proof };
    Socket socket;
    uint64_t number = 0;  // in the epoll
    int peer = -1;
    State state = awaits_hello;
    double since = seconds_now();  // in this state
    Hello hello;
    Answer answer;
    std::string received;

    size_t expected() const {
        switch (state) {
            case awaits_answer: return sizeof(Answer);
            case awaits_hello: return sizeof(Hello);
            case awaits_proof: return sizeof(Digest);
            default: return 1;
        }
    }
    bool is_ours() const { return state <= awaits_keep; }
    bool is_late(double now) const {
        switch (state) {
            case connecting: return now - since > kWaySeconds;
            case awaits_keep: return false;
            case awaits_hello: return now - since > kGuestSeconds;
            default: return now - since > kAnswerSeconds;
        }
    }
};

Connector::Connector(int rank, int size, bool listens)
    : rank_(rank), size_(size), connected_(static_cast<size_t>(size)), ready_(epoll_create1(EPOLL_CLOEXEC)) {
    if (!ready_) throw Error(DDL_ERROR_TRANSPORT, std::string("epoll_create1: ") + std::strerror(errno));
    const std::string space = network_space();
    contact_ = (space.empty() ? "?" : space) + " ";
    if (!listens) return;
    std::vector<std::string> addresses = addresses_for_other_hosts();
    addresses.insert(addresses.begin(), kLoopbackAddress);
    addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
    door_ = open_door(addresses);
    contact_ += to_text(door_.contact, kMostContact - contact_.size());
}

Connector::~Connector() = default;

// Without memory for it in the kernel the connection does not go on, and is dropped in time.
void Connector::watch(int operation, int fd, uint64_t number, bool connects) const {
    epoll_event event{};
    event.events = connects ? EPOLLOUT : EPOLLIN;
    event.data.u64 = number;
    epoll_ctl(ready_.fd(), operation, fd, &event);
}

void Connector::listen(bool on) {
    for (size_t i = 0; i < door_.listeners.size(); ++i) {
        const Socket& listener = door_.listeners[i];
        if (listener) watch(on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, listener.fd(), i);
    }
}

void Connector::let_in() {
    if (!std::exchange(open_, true)) listen(true);
}

void Connector::know(std::vector<std::string> contacts) {
    contacts_ = std::move(contacts);
    const auto is_other = [&](const std::string& contact) { return !is_here(contact); };
    if (std::any_of(contacts_.begin(), contacts_.end(), is_other)) return;
    if (door_.contact[0].address != kLoopbackAddress) return;
    for (size_t i = 1; i < door_.listeners.size(); ++i) door_.listeners[i].close();
}

void Connector::expect_cut() {
    if (cut_since_ == 0) cut_since_ = seconds_now();
}

// It begins with the same network_space(), which is known.
bool Connector::is_here(const std::string& contact) const {
    return contact_[0] != '?' && contact.compare(0, contact_.find(' ') + 1, contact_, 0, contact_.find(' ') + 1) == 0;
}

bool Connector::is_near(int peer) const {
    const auto index = static_cast<size_t>(peer);
    return index < contacts_.size() && is_here(contacts_[index]);
}

void Connector::take_seat(int rank, int size) {
    rank_ = rank;
    size_ = size;
    connected_.assign(static_cast<size_t>(size), false);
    links_.clear();
}

void Connector::leave() {
    leaves_ = true;
    rests_until_ = 0;
    for (Socket& listener : door_.listeners) listener.close();
    for (auto link = links_.begin(); link != links_.end();) {
        link = link->second.is_ours() ? std::next(link) : links_.erase(link);
    }
}

void Connector::give_up() {
    wants_.clear();
    for (auto link = links_.begin(); link != links_.end();) {
        const bool is_begun = link->second.is_ours() && link->second.state != Link::awaits_keep;
        link = is_begun ? links_.erase(link) : std::next(link);
    }
}

size_t Connector::attempts() const {
    return static_cast<size_t>(
        std::count_if(links_.begin(), links_.end(), [](const auto& link) { return link.second.is_ours(); }));
}

bool Connector::is_promised(int peer) const {
    return std::any_of(links_.begin(), links_.end(), [&](const auto& link) {
        return link.second.peer == peer && link.second.state == Link::awaits_keep;
    });
}

void Connector::add(Link link, bool connects) {
    link.number = kDoors + ++last_;
    watch(EPOLL_CTL_ADD, link.socket.fd(), link.number, connects);
    const uint64_t number = link.number;
    links_.emplace(number, std::move(link));
}

void Connector::connect(int peer, const std::string& contact) {
    const size_t space = contact.find(' ');
    if (space == std::string::npos) return;
    Contact all = contact_of(contact.substr(space + 1));
    // A rank of this host is reached through the loopback interface, and no other rank is.
    const bool known = contact[0] != '?' && contact_[0] != '?';
    const auto is_loopback = [](const Endpoint& one) { return one.address == kLoopbackAddress; };
    const bool has_loopback = std::any_of(all.begin(), all.end(), is_loopback);
    bool was_refused = false, was_tried = false, is_short = false;
    for (const Endpoint& one : all) {
        if (known && (is_here(contact) && has_loopback) != is_loopback(one)) continue;
        for (const std::string& address : ways_to(one)) {
            Link link;
            link.socket = connect_to(address, one.port);
            link.peer = peer;
            link.state = Link::connecting;
            if (link.socket) {
                add(std::move(link), true);
                was_tried = true;
                continue;
            }
            was_refused |= errno == ECONNREFUSED;
            is_short |= errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
            was_tried |= errno != EADDRNOTAVAIL && errno != EAGAIN;
        }
    }
    const auto want = wants_.find(peer);
    if (want == wants_.end()) return;
    want->second.was_refused = was_refused;
    // What this rank lacks itself says nothing about the other.
    if (is_short || !was_tried) want->second.unanswered_since = want->second.refused_since = 0;
    want->second.failed = is_short;
}

bool Connector::is_unanswered(int peer) const {
    const auto want = wants_.find(peer);
    return want != wants_.end() && want->second.unanswered_since > 0 &&
           seconds_now() - want->second.unanswered_since > kUnansweredSeconds;
}

void Connector::want(int peer) {
    if (!is_connected(peer)) wants_.emplace(peer, Want{});
}

void Connector::try_wanted(double now) {
    std::vector<bool> is_tried(connected_.size());
    size_t room = kMostTries;
    for (const auto& [number, link] : links_) {
        if (!link.is_ours()) continue;
        is_tried[static_cast<size_t>(link.peer)] = true;
        const double most = link.state == Link::connecting ? kTrySeconds : kWaySeconds;
        if (room > 0 && now - link.since < most) --room;
    }
    std::vector<std::pair<double, int>> due;
    for (auto entry = wants_.begin(); entry != wants_.end();) {
        const auto here = entry++;
        const int peer = here->first;
        Want& want = here->second;
        if (is_connected(peer)) {
            wants_.erase(here);
            continue;
        }
        const bool unreachable = cut_since_ > 0 && want.unanswered_since > 0 &&
                                 now - std::max(want.unanswered_since, cut_since_) > kCutSeconds && !is_near(peer);
        const bool is_over = !is_tried[static_cast<size_t>(peer)];  // the last try
        if (is_over) (want.was_refused && !want.failed ? want.unanswered_since : want.refused_since) = 0;
        const bool refused =
            is_over && want.refused_since > 0 && (leaves_ || now - want.refused_since > kRefusedSeconds);
        if (refused || unreachable) {
            news_.push_back({peer, refused ? News::refused : News::unreachable, {}, 0});
            wants_.erase(here);
        } else if (is_over && now >= want.next_try) {
            due.emplace_back(want.next_try, peer);
        }
    }
    std::sort(due.begin(), due.end());  // who has waited longest comes first
    due.resize(std::min(room, due.size()));
    for (const auto& [time, peer] : due) {
        Want& want = wants_.at(peer);
        want.next_try = now + kRetrySeconds;
        for (double* since : {&want.unanswered_since, &want.refused_since}) {
            if (*since == 0) *since = now;
        }
        connect(peer, contacts_[static_cast<size_t>(peer)]);
    }
}

bool Connector::next(News* news) {
    if (news_.empty()) return false;
    *news = std::move(news_.front());
    news_.pop_front();
    return true;
}

void Connector::accept_at(size_t door, double now) {
    for (int taken = 0; taken < 64; ++taken) {
        Link link;
        link.socket = accept_from(door_.listeners[door]);
        if (link.socket) {
            keep_alive(link.socket);
            add(std::move(link), false);
            continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            if (rests_until_ == 0) listen(false);
            rests_until_ = now + kRestSeconds;
        }
        return;
    }
}

void Connector::serve(int milliseconds) {
    double now = seconds_now();
    if (rests_until_ > 0 && now >= rests_until_) {
        rests_until_ = 0;
        listen(true);
    }
    try_wanted(now);
    epoll_event events[64];
    const int count = epoll_wait(ready_.fd(), events, 64, milliseconds);
    now = seconds_now();
    for (int i = 0; i < count; ++i) {
        const uint64_t number = events[i].data.u64;
        if (number < kDoors) {
            accept_at(number, now);
        } else if (const auto found = links_.find(number); found != links_.end() && !advance(found->second)) {
            links_.erase(found);
        }
    }
    size_t guests = 0;
    for (auto link = links_.end(); link != links_.begin();) {
        const Link& its = (--link)->second;
        // The newest guests first: of too many the oldest go.
        const bool is_surplus = !its.is_ours() && ++guests > kMostGuests + connected_.size();
        if (!is_surplus && !its.is_late(now)) continue;
        if (const auto want = wants_.find(its.peer); want != wants_.end() && its.is_ours()) want->second.failed = true;
        link = links_.erase(link);
    }
}

// False: the connection is over, or another's.
bool Connector::advance(Link& link) {
    if (link.state == Link::connecting) {
        const int error = error_of(link.socket);
        if (const auto found = wants_.find(link.peer); found != wants_.end()) {
            Want& want = found->second;
            want.was_refused |= error == ECONNREFUSED;
            want.failed |= error != ECONNREFUSED;
            if (error == 0) want.unanswered_since = 0;
        }
        if (error != 0 || is_connected(link.peer)) return false;
        keep_alive(link.socket);
        watch(EPOLL_CTL_MOD, link.socket.fd(), link.number);
        link.hello.from = rank_;
        link.hello.to = link.peer;
        link.hello.epoch = epoch_;
        for (uint64_t& word : link.hello.nonce) word = random_number();
        link.state = Link::awaits_answer;
        link.since = seconds_now();
        return send_small(link.socket, link.hello);
    }
    char buffer[64];
    const size_t most = link.expected() - link.received.size();
    const ssize_t count = recv(link.socket.fd(), buffer, std::min(most, sizeof buffer), MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    turned_away_ |= count <= 0 && link.state == Link::awaits_answer;
    if (count <= 0) return false;
    link.received.append(buffer, static_cast<size_t>(count));
    if (link.received.size() < link.expected()) return true;
    const std::string got = std::exchange(link.received, {});
    if (link.state == Link::awaits_hello) {
        std::memcpy(&link.hello, got.data(), sizeof link.hello);
        const int from = link.hello.from;
        if (link.hello.magic != kMagic || link.hello.to != rank_ || from == rank_ || from < 0 || from >= size_ ||
            link.hello.epoch > epoch_ || is_connected(from)) {
            return false;
        }
        link.peer = from;
        for (uint64_t& word : link.answer.nonce) word = random_number();
        link.answer.proof = prove(token_, 'a', link.hello, link.answer.nonce);
        link.state = Link::awaits_proof;
        link.since = seconds_now();
        return send_small(link.socket, link.answer);
    }
    if (link.state == Link::awaits_keep) {
        connected(link);
        return false;
    }
    const bool ours = link.state == Link::awaits_answer;
    if (ours) {
        std::memcpy(&link.answer, got.data(), sizeof link.answer);
        turned_away_ = false;
    }
    const Digest right = prove(token_, ours ? 'a' : 'c', link.hello, link.answer.nonce);
    const auto* theirs = ours ? link.answer.proof.data() : reinterpret_cast<const unsigned char*>(got.data());
    if (is_connected(link.peer) || !is_same(right, theirs)) return false;
    if (ours) {
        // One of several connections: the other end keeps it, or closes it because we were slow.
        if (is_promised(link.peer)) return false;
        link.state = Link::awaits_keep;
        return send_small(link.socket, prove(token_, 'c', link.hello, link.answer.nonce));
    }
    // Both connect: the lower one accepts, if it is reached at all, and answers.
    const auto is_rival = [&](const auto& other) {
        const Link& its = other.second;
        const bool is_promising = its.state == Link::awaits_answer && seconds_now() - its.since < kWaySeconds;
        return its.peer == link.peer && (is_promising || its.state == Link::awaits_keep);
    };
    if (link.peer < rank_ && std::any_of(links_.begin(), links_.end(), is_rival)) return false;
    if (send_small(link.socket, char{1})) connected(link);
    return false;
}

void Connector::connected(Link& link) {
    connected_[static_cast<size_t>(link.peer)] = true;
    epoll_ctl(ready_.fd(), EPOLL_CTL_DEL, link.socket.fd(), nullptr);
    news_.push_back({link.peer, News::connected, std::move(link.socket), static_cast<uint32_t>(link.hello.epoch)});
}

}  // namespace ddl
