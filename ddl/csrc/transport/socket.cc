#include "transport/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <memory>

namespace ddl {
namespace {

constexpr int kFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr int kBacklog = SOMAXCONN;  // all may connect at once, and while this rank has something else to do

void set(const Socket& socket, int level, int option, int value) {
    // Without one of these options a death is found later, not never.
    static_cast<void>(setsockopt(socket.fd(), level, option, &value, sizeof value));
}

// By descriptor, those below kMostSockets; `end` is above all of them. The memory is only touched as far as they go.
constexpr int kMostSockets = 1 << 20;
std::bitset<kMostSockets> sockets;
int end = 0;

void close_all() {
    while (end-- > 0) {
        if (sockets[static_cast<size_t>(end)]) ::close(end);
        sockets[static_cast<size_t>(end)] = false;
    }
    end = 0;
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// A numeric address as the kernel takes it; none if it is no such address.
Addresses parse(const std::string& address, uint16_t port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
    return {found, freeaddrinfo};
}

}  // namespace

std::mutex& Socket::forks() {
    static std::mutex mutex;
    // The child's copies of the objects then own nothing.
    [[maybe_unused]] static const int registered = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                                                  [] {
                                                                      close_all();
                                                                      mutex.unlock();
                                                                  });
    return mutex;
}

void Socket::own(int fd) {
    fd_ = fd;
    if (fd < 0 || fd >= kMostSockets) return;
    sockets[static_cast<size_t>(fd)] = true;
    end = std::max(end, fd + 1);
}

void Socket::close() {
    if (fd_ < 0) return;
    const std::lock_guard lock(forks());
    const int fd = std::exchange(fd_, -1);
    const auto index = static_cast<size_t>(fd);
    if (fd < kMostSockets && !sockets[index]) return;  // in a child
    if (fd < kMostSockets) sockets[index] = false;
    ::close(fd);
}

Socket listen_at(const std::string& address, uint16_t* port) {
    const Addresses found = parse(address, *port);
    if (!found) return {};
    Socket made([&] { return socket(found->ai_family, kFlags, 0); });
    if (!made) return {};
    // A port that was asked for may still have connections of a job before this one.
    if (*port != 0) set(made, SOL_SOCKET, SO_REUSEADDR, 1);
    if (bind(made.fd(), found->ai_addr, found->ai_addrlen) != 0 || listen(made.fd(), kBacklog) != 0) return {};
    sockaddr_in6 bound{};  // large enough for both families, whose ports lie at the same place
    socklen_t length = sizeof bound;
    if (getsockname(made.fd(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) return {};
    *port = ntohs(bound.sin6_port);
    return made;
}

Socket accept_from(const Socket& listener) {
    return Socket([&] { return accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
}

Socket connect_to(const std::string& address, uint16_t port) {
    const Addresses found = parse(address, port);
    errno = EINVAL;
    if (!found) return {};
    Socket made([&] { return socket(found->ai_family, kFlags, 0); });
    if (!made) return {};
    const bool begun = connect(made.fd(), found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS;
    return begun ? std::move(made) : Socket();
}

int error_of(const Socket& socket) {
    int error = 0;
    socklen_t length = sizeof error;
    return getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

bool is_local(const Socket& socket) {
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&own), &length) != 0) return false;
    if (own.ss_family != AF_INET) return own.ss_family == AF_UNIX;
    return ntohl(reinterpret_cast<const sockaddr_in*>(&own)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

void keep_alive(const Socket& socket) {
    const bool local = is_local(socket);  // then probes only ask again for an end that was dropped
    set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(socket, IPPROTO_TCP, TCP_KEEPIDLE, local ? 5 : 2);   // seconds without traffic before the first probe
    set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);              // seconds between probes
    set(socket, IPPROTO_TCP, TCP_KEEPCNT, local ? 127 : 3);  // probes without an answer; 127 is the kernel's most
    set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
}

void end_if_unanswered(const Socket& socket) {
    if (!is_local(socket)) set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 4500);  // milliseconds
}

bool was_silent(const Socket& socket) {
    // Milliseconds: more than lie between two probes that arrive, and less than keep_alive() gives the other end.
    const unsigned most = is_local(socket) ? 60000 : 3000;
    tcp_info info{};
    socklen_t length = sizeof info;
    return getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_last_ack_recv > most;
}

}  // namespace ddl
