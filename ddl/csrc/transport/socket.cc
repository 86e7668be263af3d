#include "transport/socket.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/ip_network.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr int kFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr int kBacklog = 256;  // peers connect while this rank still waits for the last one to start

void set(const Socket& socket, int level, int option, int value) {
    // Without one of these options a death is found later, not never.
    static_cast<void>(setsockopt(socket.fd(), level, option, &value, sizeof value));
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// A numeric address as the kernel wants it; none if it is no such address.
Addresses parse(const std::string& address, uint16_t port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
    return {found, freeaddrinfo};
}

IpNetwork parse_network(const std::string& text) {
    IpNetwork network;
    if (read_network(text.data(), text.size(), &network)) return network;
    throw Error(DDL_ERROR_ARGUMENT,
                "DDL_NETWORKS has '" + text + "', but must be networks by commas, such as 10.0.0.0/24 or fd00::/8");
}

}  // namespace

void Socket::close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

Socket listen_at(const std::string& address, uint16_t* port) {
    const Addresses found = parse(address, 0);
    if (!found) return {};
    Socket made(socket(found->ai_family, kFlags, 0));
    if (!made || bind(made.fd(), found->ai_addr, found->ai_addrlen) != 0 || listen(made.fd(), kBacklog) != 0) return {};
    sockaddr_in6 bound{};  // large enough for both families, whose ports lie at the same place
    socklen_t length = sizeof bound;
    if (getsockname(made.fd(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) return {};
    *port = ntohs(bound.sin6_port);
    return made;
}

Socket accept_from(const Socket& listener) {
    return Socket(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

Socket connect_to(const std::string& address, uint16_t port) {
    const Addresses found = parse(address, port);
    if (!found) return {};
    Socket made(socket(found->ai_family, kFlags, 0));
    if (!made) return {};
    const bool begun = connect(made.fd(), found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS;
    return begun ? std::move(made) : Socket();
}

int error_of(const Socket& socket) {
    int error = 0;
    socklen_t length = sizeof error;
    return getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

void keep_alive(const Socket& socket) {
    set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 2);   // seconds without traffic before the first probe
    set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);  // seconds between probes
    // Milliseconds until the connection ends, of probes or of data without an answer.
    set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 4500);
    set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
}

bool was_silent(const Socket& socket) {
    constexpr unsigned kMost = 3000;  // milliseconds: more than lie between two probes, and less than end it
    tcp_info info{};
    socklen_t length = sizeof info;
    return getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_last_ack_recv > kMost;
}

std::vector<std::string> local_addresses(const std::vector<std::string>& networks) {
    std::vector<IpNetwork> wanted;
    for (const std::string& network : networks) wanted.push_back(parse_network(network));
    const auto is_wanted = [&](int family, const void* address, bool loopback) {
        if (wanted.empty()) return !loopback;
        return std::any_of(wanted.begin(), wanted.end(),
                           [&](const IpNetwork& network) { return network.contains(family, address); });
    };
    ifaddrs* found = nullptr;
    if (getifaddrs(&found) != 0) return {};
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(found, freeifaddrs);
    std::vector<std::string> addresses[2];  // of IPv4, of IPv6
    for (const ifaddrs* entry = found; entry; entry = entry->ifa_next) {
        if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP)) continue;
        const bool loopback = entry->ifa_flags & IFF_LOOPBACK;
        char text[INET6_ADDRSTRLEN] = "";
        if (entry->ifa_addr->sa_family == AF_INET) {
            const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
            if (!is_wanted(AF_INET, &address->sin_addr, loopback)) continue;
            inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
            addresses[0].emplace_back(text);
        } else if (entry->ifa_addr->sa_family == AF_INET6) {
            const auto* address = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
            if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;  // means nothing without an interface
            if (!is_wanted(AF_INET6, &address->sin6_addr, loopback)) continue;
            inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
            addresses[1].emplace_back(text);
        }
    }
    addresses[0].insert(addresses[0].end(), addresses[1].begin(), addresses[1].end());
    return addresses[0];
}

}  // namespace ddl
