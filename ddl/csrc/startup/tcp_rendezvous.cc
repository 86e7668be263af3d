#include "startup/tcp_rendezvous.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <sstream>

#include "base/backoff.h"
#include "base/patience.h"
#include "base/random_number.h"
#include "base/status.h"
#include "transport/connector.h"

namespace ddl {
namespace {

constexpr double kRetrySeconds = 2;  // without success: the store is read again
constexpr size_t kMostLine = 1024;   // bytes of a rank's contact
constexpr int kServeMilliseconds = 50;
constexpr size_t kMostAttempts = 32;  // at once: with hundreds of ranks a host has too much to do to answer all in time

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
          sockets_(static_cast<size_t>(members.size)),
          connector_(members.rank, members.size,
                     [this](int peer, Socket socket) { sockets_[static_cast<size_t>(peer)] = std::move(socket); }) {}

    std::vector<Socket> run() {
        const int rank = members_.rank, size = members_.size;
        std::vector<std::string> contacts(sockets_.size());
        if (rank == 0) {
            std::string token;
            for (int i = 0; i < 4; ++i) token += std::to_string(random_number());
            token.resize(60);
            connector_.set_token(token);
            connector_.let_in();
            if (!members_.set(key_, token + " " + connector_.contact())) {
                throw Error(DDL_ERROR_TRANSPORT, "ddl_init: the store did not take rank 0's address");
            }
            await({});
            contacts[0] = connector_.contact();
            for (int other = 1; other < size; ++other) contacts[static_cast<size_t>(other)] = hear(other);
            std::string all;
            for (const std::string& one : contacts) all += one + "\n";
            for (int other = 1; other < size; ++other) say(other, all);
            return std::move(sockets_);
        }
        find_first();
        connector_.let_in();  // not before the token is known to be this job's
        say(0, connector_.contact());
        std::istringstream lines(hear(0));
        for (std::string& line : contacts) std::getline(lines, line);
        await(contacts);
        return std::move(sockets_);
    }

  private:
    // Reads the key again until the rank that it names knows the token: a job before this one may have left it.
    void find_first() {
        for (Backoff backoff(0, 0.05); !connector_.is_connected(0); backoff.pause()) {
            std::string value;
            const double left = deadline_ - seconds_now();
            if (left <= 0 || !members_.get(key_, &value, left)) fail({0});
            const size_t space = value.find(' ');
            if (space == std::string::npos) continue;
            connector_.set_token(value.substr(0, space));
            connector_.connect(0, value.substr(space + 1));
            const double until = std::min(deadline_, seconds_now() + kRetrySeconds);
            while (!connector_.is_connected(0) && connector_.attempts() > 0 &&
                   (seconds_now() < until || connector_.is_promised(0))) {
                if (seconds_now() > deadline_) fail({0});
                connector_.serve(kServeMilliseconds);
            }
            connector_.give_up();
        }
    }

    // Until all others are connected: the higher ones connect, and this rank connects to the lower ones, its neighbour
    // first. `contacts`: none for rank 0.
    void await(const std::vector<std::string>& contacts) {
        int next = members_.rank - 1;
        double retry = seconds_now() + kRetrySeconds;
        for (;;) {
            std::vector<int> missing;
            for (int other = 0; other < members_.size; ++other) {
                if (other != members_.rank && !connector_.is_connected(other)) missing.push_back(other);
            }
            if (missing.empty()) return;
            if (seconds_now() > deadline_) fail(missing);
            if (seconds_now() > retry) {
                retry = seconds_now() + kRetrySeconds;
                for (const int other : missing) {
                    if (other < members_.rank && other > next && !connector_.is_promised(other)) {
                        connector_.connect(other, contacts[static_cast<size_t>(other)]);
                    }
                }
            }
            for (; next > 0 && connector_.attempts() < kMostAttempts; --next) {
                connector_.connect(next, contacts[static_cast<size_t>(next)]);
            }
            connector_.serve(kServeMilliseconds);
        }
    }

    [[noreturn]] void fail(const std::vector<int>& missing) const {
        throw Error(DDL_ERROR_TIMEOUT, "ddl_init: rank " + std::to_string(members_.rank) + " has waited " +
                                           std::to_string(static_cast<int>(timeout_)) + " s for " + name_list(missing) +
                                           ": not started, or no TCP connection is possible. " + kPatienceOfInit);
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
        if (bytes > (kMostLine + 1) * sockets_.size())
            throw Error(DDL_ERROR_INTERNAL, "ddl_init: no table of addresses");
        std::string text(bytes, '\0');
        move(peer, text.data(), text.size(), false);
        return text;
    }

    const Membership& members_;
    const std::string key_;
    const double deadline_, timeout_;
    std::vector<Socket> sockets_;
    Connector connector_;
};

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

std::vector<Socket> meet(const Membership& members, int round, double timeout_seconds) {
    if (members.size == 1) return std::vector<Socket>(1);
    return Meeting(members, round, timeout_seconds).run();
}

}  // namespace ddl
