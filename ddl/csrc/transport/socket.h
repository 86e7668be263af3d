// TCP sockets. None of them blocks. None is inherited by a program that is executed, and a child that is forked closes
// its copies: they would keep connections and ports open beyond this process's end.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace ddl {

class Socket {
  public:
    Socket() = default;
    // Owns a descriptor.
    explicit Socket(int fd) : Socket([=] { return fd; }) {}
    // Owns what `make` returns, if that is not negative. No fork of this process comes in between.
    template <typename Make, typename = decltype(std::declval<Make>()())>
    explicit Socket(Make make) {
        const std::lock_guard lock(forks());
        own(make());
    }
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
    static std::mutex& forks();  // guards which descriptors are sockets of this process
    void own(int fd);

    int fd_ = -1;
};

// Listens at a numeric address of this host ("10.0.0.1", "fd00::1", "fe80::1%eth0"), at `*port`; if that is 0, the
// kernel chooses one, and it is stored there. None if that is not possible: errno says why.
Socket listen_at(const std::string& address, uint16_t* port);

// The next connection of a listening socket; none if none waits.
Socket accept_from(const Socket& listener);

// Begins to connect to a numeric address; none if that failed at once: errno says why.
Socket connect_to(const std::string& address, uint16_t port);

// The error that a socket has run into since it was last asked for; 0: none.
int error_of(const Socket& socket);

// Between processes of this host, over its loopback interface.
bool is_local(const Socket& socket);

// Lets the kernel probe the other end while the connection is idle, and end it after some 5 seconds of silence. The
// other kernel answers, whatever its process does: a rank that is stopped or slow stays connected. Inside a host
// it takes 132 seconds: with thousands of connections the loopback interface drops probes, and the end of a process is
// known without them. Small pieces leave at once.
void keep_alive(const Socket& socket);
// Ends it as soon as well if something was sent and is not acknowledged. For short messages alone: the kernel counts a
// receiver that does not read, and has no room for more, as silent.
void end_if_unanswered(const Socket& socket);

// Whether the other end of a connection under keep_alive() was silent before the connection ended. If so, its host or
// the network is gone, or was for a while; inside a host, the loopback interface. If not, its process ended. (The
// kernel's error does not tell: a send may have taken it, and a host that is back answers with a reset.)
bool was_silent(const Socket& socket);

}  // namespace ddl
