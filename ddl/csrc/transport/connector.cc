#include "transport/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "base/backoff.h"
#include "base/random_number.h"
#include "base/sha256.h"

namespace ddl {
namespace {

constexpr uint64_t kMagic = 0x32706374206c6464;
constexpr double kGuestSeconds = 2;    // in which a connection must say whose it is
constexpr size_t kMostGuests = 64;     // beyond the ranks, at once
constexpr size_t kMostContact = 1000;  // bytes
constexpr double kRestSeconds = 1;     // for which nobody is let in after descriptors have run out

struct Hello {
    uint64_t magic = kMagic;
    int32_t from = -1, to = -1;
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
    int peer = -1;
    State state = awaits_hello;
    double since = seconds_now();
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
};

Connector::Connector(int rank, int size, std::function<void(int, Socket)> on_connected)
    : rank_(rank), size_(size), on_connected_(std::move(on_connected)), connected_(static_cast<size_t>(size)) {
    std::vector<std::string> addresses = addresses_for_other_hosts();
    addresses.insert(addresses.begin(), kLoopbackAddress);
    addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
    door_ = open_door(addresses);
    const std::string space = network_space();
    contact_ = (space.empty() ? "?" : space) + " ";
    contact_ += to_text(door_.contact, kMostContact - contact_.size());
}

Connector::~Connector() = default;

void Connector::give_up() { links_.clear(); }

size_t Connector::attempts() const {
    return static_cast<size_t>(
        std::count_if(links_.begin(), links_.end(), [](const Link& link) { return link.is_ours(); }));
}

bool Connector::is_promised(int peer) const {
    return std::any_of(links_.begin(), links_.end(),
                       [&](const Link& link) { return link.peer == peer && link.state == Link::awaits_keep; });
}

void Connector::connect(int peer, const std::string& contact) {
    const size_t space = contact.find(' ');
    if (space == std::string::npos) return;
    Contact all = contact_of(contact.substr(space + 1));
    // A rank of this host is reached through the loopback interface, and no other rank is.
    const bool known = contact[0] != '?' && contact_[0] != '?';
    const bool is_here = known && contact.compare(0, space + 1, contact_, 0, space + 1) == 0;
    const auto is_loopback = [](const Endpoint& one) { return one.address == kLoopbackAddress; };
    const bool has_loopback = std::any_of(all.begin(), all.end(), is_loopback);
    for (const Endpoint& one : all) {
        if (known && (is_here && has_loopback) != is_loopback(one)) continue;
        for (const std::string& address : ways_to(one)) {
            Link link;
            link.socket = connect_to(address, one.port);
            link.peer = peer;
            link.state = Link::connecting;
            if (link.socket) links_.push_back(std::move(link));
        }
    }
}

void Connector::serve(int milliseconds) {
    std::vector<pollfd> waits;
    const bool listens = open_ && seconds_now() >= listens_from_;
    for (const Socket& listener : door_.listeners) waits.push_back({listens ? listener.fd() : -1, POLLIN, 0});
    for (const Link& link : links_) {
        waits.push_back({link.socket.fd(), static_cast<short>(link.state == Link::connecting ? POLLOUT : POLLIN), 0});
    }
    poll(waits.data(), waits.size(), milliseconds);
    const double now = seconds_now();
    size_t guests = 0;
    for (size_t i = links_.size(); i-- > 0;) {
        const short seen = waits[door_.listeners.size() + i].revents;
        bool keep = seen == 0 || advance(links_[i]);
        // The newest guests first: of too many the oldest go.
        if (keep && !links_[i].is_ours() && ++guests > kMostGuests + connected_.size()) keep = false;
        if (keep && links_[i].state != Link::awaits_keep && now - links_[i].since > kGuestSeconds) keep = false;
        if (!keep || !links_[i].socket) links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (size_t i = 0; i < door_.listeners.size(); ++i) {
        for (int taken = 0; waits[i].revents != 0 && taken < 64; ++taken) {
            Link link;
            link.socket = accept_from(door_.listeners[i]);
            if (!link.socket) {
                if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                    listens_from_ = now + kRestSeconds;
                }
                break;
            }
            links_.push_back(std::move(link));
        }
    }
}

// False: the connection is to be closed.
bool Connector::advance(Link& link) {
    if (link.state == Link::connecting) {
        if (error_of(link.socket) != 0 || is_connected(link.peer)) return false;
        link.hello.from = rank_;
        link.hello.to = link.peer;
        for (uint64_t& word : link.hello.nonce) word = random_number();
        link.state = Link::awaits_answer;
        return send_small(link.socket, link.hello);
    }
    char buffer[64];
    const size_t most = link.expected() - link.received.size();
    const ssize_t count = recv(link.socket.fd(), buffer, std::min(most, sizeof buffer), MSG_DONTWAIT);
    if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR);
    link.received.append(buffer, static_cast<size_t>(count));
    if (link.received.size() < link.expected()) return true;
    const std::string got = std::move(link.received);
    link.received.clear();
    if (link.state == Link::awaits_hello) {
        std::memcpy(&link.hello, got.data(), sizeof link.hello);
        const int from = link.hello.from;
        if (link.hello.magic != kMagic || link.hello.to != rank_ || from <= rank_ || from >= size_ ||
            is_connected(from)) {
            return false;
        }
        link.peer = from;
        for (uint64_t& word : link.answer.nonce) word = random_number();
        link.answer.proof = prove(token_, 'a', link.hello, link.answer.nonce);
        link.state = Link::awaits_proof;
        return send_small(link.socket, link.answer);
    }
    if (link.state == Link::awaits_keep) {
        connected(link);
        return true;
    }
    const bool ours = link.state == Link::awaits_answer;
    if (ours) std::memcpy(&link.answer, got.data(), sizeof link.answer);
    const Digest right = prove(token_, ours ? 'a' : 'c', link.hello, link.answer.nonce);
    const auto* theirs = ours ? link.answer.proof.data() : reinterpret_cast<const unsigned char*>(got.data());
    if (is_connected(link.peer) || !is_same(right, theirs)) return false;
    if (ours) {
        // One of several connections: the other end keeps it, or closes it because we were slow.
        if (is_promised(link.peer)) return false;
        link.state = Link::awaits_keep;
        return send_small(link.socket, prove(token_, 'c', link.hello, link.answer.nonce));
    }
    if (!send_small(link.socket, char{1})) return false;
    connected(link);
    return true;
}

void Connector::connected(Link& link) {
    connected_[static_cast<size_t>(link.peer)] = true;
    on_connected_(link.peer, std::move(link.socket));
}

}  // namespace ddl
