#include "startup/tcp_rendezvous.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/backoff.h"
#include "base/patience.h"
#include "base/random_number.h"
#include "base/sha256.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr uint64_t kMagic = 0x31706374206c6464;
constexpr double kGuestSeconds = 2;  // in which a connection must say whose it is
constexpr size_t kMostGuests = 64;   // beyond the ranks, at once
constexpr double kRetrySeconds = 2;  // without success: the store is read again
constexpr size_t kMostTable = 1024;  // bytes of a rank's contact

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

struct Link {
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
    bool ours() const { return state <= awaits_keep; }
};

template <typename T>
bool send_small(const Socket& socket, const T& value) {
    return send(socket.fd(), &value, sizeof value, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof value);
}

std::string name_list(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < std::min<size_t>(ranks.size(), 8); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
    return ranks.size() > 8 ? text + " and " + std::to_string(ranks.size() - 8) + " more" : text;
}

// One rank's part.
class Meeting {
  public:
    Meeting(const Membership& members, int round, double timeout)
        : members_(members),
          key_("ddl/rendezvous/" + std::to_string(round)),
          deadline_(seconds_now() + timeout),
          timeout_(timeout),
          sockets_(static_cast<size_t>(members.size)) {
        std::vector<std::string> addresses = {"127.0.0.1"};
        const char* text = std::getenv("DDL_NETWORKS");
        std::string networks = text ? text : "";
        std::replace(networks.begin(), networks.end(), ',', ' ');
        std::istringstream stream(networks);
        std::vector<std::string> wanted;
        for (std::string word; stream >> word;) wanted.push_back(word);
        for (std::string& address : local_addresses(wanted)) addresses.push_back(std::move(address));
        for (const std::string& address : addresses) {
            uint16_t port = 0;
            Socket listener = listen_at(address, &port);
            if (!listener) continue;
            const std::string one = address + " " + std::to_string(port) + " ";
            if (contact_.size() + one.size() > kMostTable) continue;
            contact_ += one;
            listeners_.push_back(std::move(listener));
        }
        if (listeners_.empty()) {
            throw Error(DDL_ERROR_TRANSPORT,
                        "ddl_init: no TCP port to listen at, at any address of this host: DDL_NETWORKS, if it is set, "
                        "must name networks that this host is in");
        }
    }

    std::vector<Socket> run() {
        const int rank = members_.rank, size = members_.size;
        std::vector<std::string> table(sockets_.size());
        if (rank == 0) {
            for (int i = 0; i < 4; ++i) token_ += std::to_string(random_number());
            token_ = token_.substr(0, 60);
            if (!members_.set(key_, token_ + " " + contact_)) {
                throw Error(DDL_ERROR_TRANSPORT, "ddl_init: the store did not take rank 0's address");
            }
            open_ = true;
            await({}, all_from(1));
            table[0] = contact_;
            for (int other = 1; other < size; ++other) table[static_cast<size_t>(other)] = hear(other);
            std::string all;
            for (const std::string& one : table) all += one + "\n";
            for (int other = 1; other < size; ++other) say(other, all);
            return std::move(sockets_);
        }
        find_first();
        open_ = true;  // not before the token is known to be this job's
        say(0, contact_);
        std::istringstream lines(hear(0));
        for (std::string& line : table) std::getline(lines, line);
        for (int other = 1; other < rank; ++other) connect(other, table[static_cast<size_t>(other)]);
        std::vector<int> rest;
        for (int other = 1; other < size; ++other) {
            if (other != rank) rest.push_back(other);
        }
        await(table, rest);
        return std::move(sockets_);
    }

  private:
    std::vector<int> all_from(int first) const {
        std::vector<int> ranks;
        for (int rank = first; rank < members_.size; ++rank) ranks.push_back(rank);
        return ranks;
    }
    bool is_promised(int rank) const {
        return std::any_of(links_.begin(), links_.end(),
                           [&](const Link& link) { return link.peer == rank && link.state == Link::awaits_keep; });
    }
    bool is_up(int rank) const { return static_cast<bool>(sockets_[static_cast<size_t>(rank)]); }

    // Reads the key again until whom it names knows the token: a job before this one may have left it.
    void find_first() {
        for (Backoff backoff(0, 0.05); !is_up(0); backoff.pause()) {
            std::string value;
            const double left = deadline_ - seconds_now();
            if (left <= 0 || !members_.get(key_, &value, left)) fail({0});
            const size_t space = value.find(' ');
            if (space == std::string::npos) continue;
            token_ = value.substr(0, space);
            connect(0, value.substr(space + 1));
            const double until = std::min(deadline_, seconds_now() + kRetrySeconds);
            while (!is_up(0) && !links_.empty() && (seconds_now() < until || is_promised(0))) {
                if (seconds_now() > deadline_) fail({0});
                serve();
            }
            links_.clear();
        }
    }

    void connect(int peer, const std::string& contact) {
        std::istringstream stream(contact);
        std::string address;
        for (int port = 0; stream >> address >> port;) {
            Link link;
            link.socket = connect_to(address, static_cast<uint16_t>(port));
            link.peer = peer;
            link.state = Link::connecting;
            if (link.socket) links_.push_back(std::move(link));
        }
    }

    void await(const std::vector<std::string>& table, const std::vector<int>& wanted) {
        double retry = seconds_now() + kRetrySeconds;
        for (;;) {
            std::vector<int> missing;
            for (const int rank : wanted) {
                if (!is_up(rank)) missing.push_back(rank);
            }
            if (missing.empty()) return;
            if (seconds_now() > deadline_) fail(missing);
            if (seconds_now() > retry) {
                retry = seconds_now() + kRetrySeconds;
                for (const int rank : missing) {
                    if (rank < members_.rank && !table.empty() && !is_promised(rank))
                        connect(rank, table[static_cast<size_t>(rank)]);
                }
            }
            serve();
        }
    }

    [[noreturn]] void fail(const std::vector<int>& missing) const {
        throw Error(DDL_ERROR_TIMEOUT, "ddl_init: rank " + std::to_string(members_.rank) + " has waited " +
                                           std::to_string(static_cast<int>(timeout_)) + " s for " + name_list(missing) +
                                           ": not started, or no TCP connection is possible. " + kPatienceOfInit);
    }

    // Moves all connections along, for a moment.
    void serve() {
        std::vector<pollfd> waits;
        for (const Socket& listener : listeners_) waits.push_back({open_ ? listener.fd() : -1, POLLIN, 0});
        for (const Link& link : links_) {
            waits.push_back(
                {link.socket.fd(), static_cast<short>(link.state == Link::connecting ? POLLOUT : POLLIN), 0});
        }
        poll(waits.data(), waits.size(), 50);
        const double now = seconds_now();
        size_t guests = 0;
        for (size_t i = links_.size(); i-- > 0;) {
            const short seen = waits[listeners_.size() + i].revents;
            bool keep = seen == 0 || advance(links_[i]);
            // The newest guests first: of too many the oldest go.
            if (keep && !links_[i].ours() && ++guests > kMostGuests + sockets_.size()) keep = false;
            if (keep && links_[i].state != Link::awaits_keep && now - links_[i].since > kGuestSeconds) keep = false;
            if (!keep || !links_[i].socket) links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        for (size_t i = 0; i < listeners_.size(); ++i) {
            for (int taken = 0; waits[i].revents != 0 && taken < 64; ++taken) {
                Link link;
                link.socket = accept_from(listeners_[i]);
                if (!link.socket) break;
                links_.push_back(std::move(link));
            }
        }
    }

    // False: it is to be closed.
    bool advance(Link& link) {
        if (link.state == Link::connecting) {
            if (error_of(link.socket) != 0 || is_up(link.peer)) return false;
            link.hello.from = members_.rank;
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
            if (link.hello.magic != kMagic || link.hello.to != members_.rank || from <= members_.rank ||
                from >= members_.size || is_up(from)) {
                return false;
            }
            link.peer = from;
            for (uint64_t& word : link.answer.nonce) word = random_number();
            link.answer.proof = prove(token_, 'a', link.hello, link.answer.nonce);
            link.state = Link::awaits_proof;
            return send_small(link.socket, link.answer);
        }
        if (link.state == Link::awaits_keep) {
            sockets_[static_cast<size_t>(link.peer)] = std::move(link.socket);
            return true;
        }
        const bool ours = link.state == Link::awaits_answer;
        if (ours) std::memcpy(&link.answer, got.data(), sizeof link.answer);
        const Digest right = prove(token_, ours ? 'a' : 'c', link.hello, link.answer.nonce);
        const auto* theirs = ours ? link.answer.proof.data() : reinterpret_cast<const unsigned char*>(got.data());
        if (is_up(link.peer) || !is_same(right, theirs)) return false;
        if (ours) {
            // One of several connections: the other end keeps it, or closes it because we were slow.
            if (is_promised(link.peer)) return false;
            link.state = Link::awaits_keep;
            return send_small(link.socket, prove(token_, 'c', link.hello, link.answer.nonce));
        }
        if (!send_small(link.socket, char{1})) return false;
        sockets_[static_cast<size_t>(link.peer)] = std::move(link.socket);
        return true;
    }

    void wait_for(int peer, short what) {
        pollfd wait{sockets_[static_cast<size_t>(peer)].fd(), what, 0};
        while (poll(&wait, 1, 100) == 0) {
            if (seconds_now() > deadline_) fail({peer});
        }
    }
    void move(int peer, char* data, size_t bytes, bool sends) {
        const int fd = sockets_[static_cast<size_t>(peer)].fd();
        while (bytes > 0) {
            wait_for(peer, sends ? POLLOUT : POLLIN);
            const ssize_t count = sends ? send(fd, data, bytes, MSG_NOSIGNAL) : recv(fd, data, bytes, 0);
            if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (count <= 0) {
                throw Error(DDL_ERROR_PEER_LOST, "ddl_init: rank " + std::to_string(peer) + " died during the call");
            }
            data += count;
            bytes -= static_cast<size_t>(count);
        }
    }
    void say(int peer, std::string text) {
        uint64_t bytes = text.size();
        move(peer, reinterpret_cast<char*>(&bytes), sizeof bytes, true);
        move(peer, text.data(), text.size(), true);
    }
    std::string hear(int peer) {
        uint64_t bytes = 0;
        move(peer, reinterpret_cast<char*>(&bytes), sizeof bytes, false);
        if (bytes > (kMostTable + 1) * sockets_.size())
            throw Error(DDL_ERROR_INTERNAL, "ddl_init: no table of addresses");
        std::string text(bytes, '\0');
        move(peer, text.data(), text.size(), false);
        return text;
    }

    const Membership& members_;
    const std::string key_;
    const double deadline_, timeout_;
    std::vector<Socket> sockets_;
    std::vector<Socket> listeners_;
    std::string contact_, token_;
    std::vector<Link> links_;
    bool open_ = false;  // guests are let in
};

const char* variable(const char* name) {
    const char* const text = std::getenv(name);
    return text && *text ? text : nullptr;
}

int number_of(const char* name, long least, long most) {
    const char* const text = variable(name);
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end == '\0' && value >= least && value <= most) return static_cast<int>(value);
    throw Error(DDL_ERROR_ARGUMENT, std::string("ddl_init: ") + name + " is '" + text +
                                        "', but must be a number from " + std::to_string(least) + " to " +
                                        std::to_string(most));
}

// Rank 0's store if the program gives none. Every connection gets the last value, and nothing is read from it. The
// store stays until the process ends.
class Board {
  public:
    Board(const std::string& address, const std::string& port) {
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
        for (const addrinfo* one = found; one && !listener_; one = one->ai_next) {
            Socket made(socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
            const int on = 1;
            setsockopt(made.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            if (bind(made.fd(), one->ai_addr, one->ai_addrlen) == 0 && listen(made.fd(), 1024) == 0) {
                listener_ = std::move(made);
            }
        }
        const std::string why = std::strerror(errno);
        if (found) freeaddrinfo(found);
        if (!listener_) {
            throw Error(
                DDL_ERROR_TRANSPORT,
                "ddl_init: rank 0 cannot listen at MASTER_ADDR:MASTER_PORT, " + address + ":" + port + " (" + why +
                    "): under torchrun the port is the store's of PyTorch, so start ddl through "
                    "torch.distributed or ddl_init_with; else choose an address of rank 0's host and a free port");
        }
        std::thread([this] { serve(); }).detach();
    }
    void set(const std::string& value) {
        const std::lock_guard lock(mutex_);
        value_ = value;
    }

  private:
    void serve() {
        for (;;) {
            Socket guest(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            if (!guest) {
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
                continue;
            }
            const std::lock_guard lock(mutex_);
            static_cast<void>(send(guest.fd(), value_.data(), value_.size(), MSG_NOSIGNAL));
        }
    }
    std::mutex mutex_;
    std::string value_;
    Socket listener_;
};

// What the board says; "" if it is not there.
std::string read_board(const std::string& address, const std::string& port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) return "";
    std::string text;
    for (const addrinfo* one = found; one && text.empty(); one = one->ai_next) {
        const Socket made(socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (connect(made.fd(), one->ai_addr, one->ai_addrlen) != 0 && errno != EINPROGRESS) continue;
        char buffer[2048];
        for (pollfd wait{made.fd(), POLLIN, 0}; poll(&wait, 1, 1000) > 0 && text.size() < 2 * sizeof buffer;) {
            const ssize_t count = recv(made.fd(), buffer, sizeof buffer, 0);
            if (count <= 0) break;
            text.append(buffer, static_cast<size_t>(count));
        }
    }
    freeaddrinfo(found);
    return text;
}

}  // namespace

Membership membership_of(const ddl_membership& given) {
    if (given.size < 1 || given.rank < 0 || given.rank >= given.size || !given.set || !given.get) {
        throw Error(DDL_ERROR_ARGUMENT, "ddl_init_with: rank " + std::to_string(given.rank) + " of " +
                                            std::to_string(given.size) +
                                            ": expected 0 <= rank < size, and both set and get");
    }
    Membership made;
    made.rank = given.rank;
    made.size = given.size;
    made.set = [given](const std::string& key, const std::string& value) {
        return given.set(given.context, key.c_str(), value.data(), value.size()) == 0;
    };
    made.get = [given](const std::string& key, std::string* value, double seconds) {
        std::string buffer(2048, '\0');
        size_t bytes = 0;
        const int result = given.get(given.context, key.c_str(), buffer.data(), buffer.size(), &bytes, seconds);
        if (result == 1) return false;
        if (result != 0 || bytes > buffer.size()) {
            throw Error(DDL_ERROR_TRANSPORT, "ddl_init: the store failed to give '" + key + "' (get returned " +
                                                 std::to_string(result) + ")");
        }
        *value = buffer.substr(0, bytes);
        return true;
    };
    return made;
}

bool is_in_environment() {
    return variable("RANK") && variable("WORLD_SIZE") && variable("MASTER_ADDR") && variable("MASTER_PORT");
}

Membership membership_of_environment() {
    Membership made;
    made.size = number_of("WORLD_SIZE", 1, 1 << 20);
    made.rank = number_of("RANK", 0, made.size - 1);
    number_of("MASTER_PORT", 1, 65535);
    const std::string address = variable("MASTER_ADDR"), port = variable("MASTER_PORT");
    made.set = [=](const std::string& key, const std::string& value) {
        static Board* const board = new Board(address, port);
        board->set(key + " " + value);
        return true;
    };
    made.get = [=](const std::string& key, std::string* value, double seconds) {
        const double deadline = seconds_now() + seconds;
        for (Backoff backoff(0, 0.1);; backoff.pause()) {
            const std::string text = read_board(address, port);
            if (text.compare(0, key.size() + 1, key + " ") == 0) {
                *value = text.substr(key.size() + 1);
                return true;
            }
            if (seconds_now() > deadline) return false;
        }
    };
    return made;
}

std::vector<Socket> meet(const Membership& members, int round, double timeout_seconds) {
    if (members.size == 1) return std::vector<Socket>(1);
    return Meeting(members, round, timeout_seconds).run();
}

}  // namespace ddl
