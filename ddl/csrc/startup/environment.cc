#include "startup/environment.h"

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
#include <thread>

#include "base/backoff.h"
#include "base/status.h"
#include "transport/socket.h"

namespace ddl {
namespace {

const char* variable(const char* name) {
    const char* const text = std::getenv(name);
    return text && *text ? text : nullptr;
}

// `name` is what the error calls it.
int number_in(const std::string& text, const char* name, long least, long most) {
    char* end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (!text.empty() && *end == '\0' && value >= least && value <= most) return static_cast<int>(value);
    throw Error(DDL_ERROR_ARGUMENT, std::string("ddl_init: ") + name + " is '" + text +
                                        "', but must be a number from " + std::to_string(least) + " to " +
                                        std::to_string(most));
}

int number_of(const char* name, long least, long most) { return number_in(variable(name), name, least, most); }

// Where rank 0's store is. `names`: the variables that say so, for messages; empty if none does.
struct Place {
    std::string address, port, names;
};

// IPv6 addresses may be in brackets.
std::string without_brackets(const std::string& address) {
    const bool has_them = address.size() > 2 && address.front() == '[' && address.back() == ']';
    return has_them ? address.substr(1, address.size() - 2) : address;
}

Place place_of_environment() {
    if (const char* const text = variable("DDL_RENDEZVOUS")) {
        const std::string both = text;
        const size_t colon = std::min(both.rfind(':'), both.size());
        return {without_brackets(both.substr(0, colon)), both.substr(std::min(colon + 1, both.size())),
                "DDL_RENDEZVOUS"};
    }
    const char* const address = variable("MASTER_ADDR");
    const char* const port = variable("MASTER_PORT");
    return address && port ? Place{without_brackets(address), port, "MASTER_ADDR:MASTER_PORT"} : Place{};
}

// Rank 0's store if the program gives none. Every connection gets the last value, and nothing is read from it. The
// store stays until the process ends.
class Board {
  public:
    explicit Board(const Place& place) {
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        const std::string failed = "ddl_init: rank 0 cannot listen at " + place.names + ", ";
        if (const int error = getaddrinfo(place.address.c_str(), place.port.c_str(), &hints, &found)) {
            const char* const why = error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error);
            throw Error(DDL_ERROR_TRANSPORT, failed + "because '" + place.address + "' does not resolve (" + why +
                                                 "): choose an address of rank 0's host");
        }
        for (const addrinfo* one = found; one && !listener_; one = one->ai_next) {
            Socket made(socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
            const int on = 1;
            setsockopt(made.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            if (bind(made.fd(), one->ai_addr, one->ai_addrlen) == 0 && listen(made.fd(), 1024) == 0) {
                listener_ = std::move(made);
            }
        }
        const std::string why = std::strerror(errno);
        freeaddrinfo(found);
        if (!listener_) {
            throw Error(
                DDL_ERROR_TRANSPORT,
                failed + place.address + ":" + place.port + " (" + why +
                    "): does another program have the port? Under torchrun it is the store's of PyTorch, so start ddl "
                    "through "
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

// The value on the board; "" if there is no board.
std::string read_board(const Place& place) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(place.address.c_str(), place.port.c_str(), &hints, &found) != 0) return "";
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

bool is_in_environment() { return variable("RANK") && variable("WORLD_SIZE") && !place_of_environment().names.empty(); }

Start start_of_environment(bool joins) {
    Start made;
    made.joins = joins;
    const Place place = place_of_environment();
    if (joins && place.names.empty()) {
        throw Error(DDL_ERROR_ARGUMENT,
                    "ddl_join: MASTER_ADDR and MASTER_PORT are not both set: set them as the job's ranks have them, or "
                    "give a store");
    }
    if (!joins) {
        made.size = number_of("WORLD_SIZE", 1, 1 << 20);
        made.rank = number_of("RANK", 0, made.size - 1);
    }
    number_in(place.port, place.names == "DDL_RENDEZVOUS" ? "the port of DDL_RENDEZVOUS" : "MASTER_PORT", 1, 65535);
    made.secret = secret_of_environment();
    made.set = [=](const std::string& key, const std::string& value) {
        static Board* const board = new Board(place);
        board->set(key + " " + value);
        return true;
    };
    made.get = [=](const std::string& key, std::string* value, double seconds) {
        const double deadline = seconds_now() + seconds;
        for (Backoff backoff(0, 0.1);; backoff.pause()) {
            const std::string text = read_board(place);
            if (text.compare(0, key.size() + 1, key + " ") == 0) {
                *value = text.substr(key.size() + 1);
                return true;
            }
            if (seconds_now() > deadline) return false;
        }
    };
    return made;
}

}  // namespace ddl
