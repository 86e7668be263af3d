// TCP sockets, as far as heartbeats need them. None of them blocks, and none is inherited by a program that is
// executed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ddl {

class Socket {
  public:
    Socket() = default;
    explicit Socket(int fd) : fd_(fd) {}
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Socket() { close(); }

    int fd() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void close();

  private:
    int fd_ = -1;
};

// Listens at a numeric address of this host, at a port that the kernel chooses; none if that is not possible.
Socket listen_at(const std::string& address, uint16_t* port);

// The next connection of a listening socket; none if none waits.
Socket accept_from(const Socket& listener);

// Begins to connect to a numeric address; none if that failed at once.
Socket connect_to(const std::string& address, uint16_t port);

// The error that a socket has run into since it was last asked for; 0: none.
int error_of(const Socket& socket);

// Lets the kernel probe the other end while the connection is idle, and end it after some 5 seconds of silence. The
// other kernel answers, whatever its process does: who is stopped or slow stays connected.
void keep_alive(const Socket& socket);

// Of a connection under keep_alive() that is at its end: whether the other end had been silent before, so that its host
// or the network is gone, or was for a while. If not, its process ended. (The error that the kernel gives does not
// tell: a send may have taken it, and a host that is back answers with a reset.)
bool was_silent(const Socket& socket);

// This host's addresses that lie in one of `networks` ("10.0.0.0/24", "fd00::/8"; none: in any, but for loopback),
// those of IPv4 first. They need not be routed. Throws Error(DDL_ERROR_ARGUMENT) if a network cannot be read.
std::vector<std::string> local_addresses(const std::vector<std::string>& networks);

}  // namespace ddl
