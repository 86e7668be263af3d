// libddl_doorkeeper.so, the port filter. ddlrun loads it into MPI's launcher with LD_PRELOAD. It limits who can connect
// to MPI's ports.
//
// Open MPI and MPICH listen on all addresses of a host, and no option changes that. Their first read from a new
// connection may wait for ever. So it changes these calls, only for sockets of MPI's own libraries and programs:
//
// - bind(): a port listens in the networks of DDL_DOOR ("10.0.0.0/24,...") only; if that is loopback, on loopback only.
// - accept(): a connection from this host is closed unless a process of the same user, or of root, opened it.
// - recv(): a connection is closed once MPI has waited for it for some seconds in all.
//
// It needs only the C library, because it is loaded into any program.
#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <initializer_list>

#include "base/ip_network.h"

namespace {

constexpr int kMostNetworks = 16, kMostPorts = 64;
constexpr int kMostConnections = 4096;  // whose waits are added up; for higher descriptors each read counts alone
constexpr double kSaySeconds = 5;       // that MPI waits for a connection in all, even if some bytes arrive
constexpr double kHurrySeconds = 0.5;   // instead of this, for a while after one was closed: strangers come in groups
constexpr double kHurriedSeconds = 60;  // the length of that while

struct Door {
    ddl::IpNetwork networks[kMostNetworks];
    int count = 0;
};

const Door& door() {
    static const Door made = [] {
        Door found;
        const char* text = std::getenv("DDL_DOOR");
        while (text && *text && found.count < kMostNetworks) {
            const size_t length = std::strcspn(text, ",");
            if (ddl::read_network(text, length, &found.networks[found.count])) ++found.count;
            text += length + (text[length] == ',' ? 1 : 0);
        }
        return found;
    }();
    return made;
}

int own_addresses(int family, void* first);

// Whether this host is in the networks. mpirun may run on a host that is not, and reach the others in another way.
bool is_inside() {
    static const bool found = [] {
        unsigned char any[16];
        return own_addresses(AF_INET, any) + own_addresses(AF_INET6, any) > 0;
    }();
    return found;
}

bool lies_in_any(int family, const void* address) {
    for (int i = 0; i < door().count; ++i) {
        if (door().networks[i].contains(family, address)) return true;
    }
    return false;
}

template <typename Function>
Function next(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

bool begins_with(const char* text, const char* beginning) {
    return std::strncmp(text, beginning, std::strlen(beginning)) == 0;
}

// Whether the code at `caller` is MPI's. A program that MPI starts also has sockets of its own, which are left alone.
bool is_mpis(const void* caller) {
    Dl_info info{};
    if (door().count == 0 || !is_inside() || dladdr(caller, &info) == 0 || !info.dli_fname) return false;
    const char* const slash = std::strrchr(info.dli_fname, '/');
    const char* const file = slash ? slash + 1 : info.dli_fname;
    for (const char* beginning : {"libprrte", "libpmix", "libopen-", "libmpi", "mca_", "prte_mca_", "pmix_mca_",
                                  "prterun", "prted", "orterun", "orted", "mpirun", "mpiexec", "hydra_pmi_proxy"}) {
        if (begins_with(file, beginning)) return true;
    }
    return false;
}

// An IPv4 address, even if written as IPv6; else an IPv6 address.
struct Address {
    int family = AF_UNSPEC;
    unsigned char bytes[16] = {};
    uint16_t port = 0;  // in host byte order
};

bool same(const Address& one, const Address& other) {
    return one.family == other.family && std::memcmp(one.bytes, other.bytes, sizeof one.bytes) == 0;
}

Address read_ipv6(const unsigned char* bytes, uint16_t port) {
    static constexpr unsigned char kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const bool mapped = std::memcmp(bytes, kMapped, sizeof kMapped) == 0;
    Address found;
    found.family = mapped ? AF_INET : AF_INET6;
    std::memcpy(found.bytes, bytes + (mapped ? 12 : 0), mapped ? 4 : 16);
    found.port = port;
    return found;
}

Address read(const sockaddr_storage& storage) {
    Address found;
    if (storage.ss_family == AF_INET) {
        const auto& four = reinterpret_cast<const sockaddr_in&>(storage);
        found.family = AF_INET;
        std::memcpy(found.bytes, &four.sin_addr, 4);
        found.port = ntohs(four.sin_port);
    } else if (storage.ss_family == AF_INET6) {
        const auto& six = reinterpret_cast<const sockaddr_in6&>(storage);
        found = read_ipv6(six.sin6_addr.s6_addr, ntohs(six.sin6_port));
    }
    return found;
}

bool is_loopback(const Address& address) {
    if (address.family == AF_INET) return address.bytes[0] == 127;
    return address.family == AF_INET6 && std::memcmp(address.bytes, &in6addr_loopback, 16) == 0;
}

bool is_unspecified(const Address& address) {
    static constexpr unsigned char kNone[16] = {};
    return address.family != AF_UNSPEC && std::memcmp(address.bytes, kNone, sizeof kNone) == 0;
}

// The number of this host's addresses in the networks, for a family, and the first of them.
int own_addresses(int family, void* first) {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) return 0;
    int count = 0;
    for (const ifaddrs* one = all; one; one = one->ifa_next) {
        if (!one->ifa_addr || one->ifa_addr->sa_family != family) continue;
        const void* its = family == AF_INET
                              ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr)
                              : &reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
        if (!lies_in_any(family, its)) continue;
        if (count++ == 0) std::memcpy(first, its, family == AF_INET ? 4 : 16);
    }
    freeifaddrs(all);
    return count;
}

// Ports at which MPI listens in this process: a connection with such a local port was accepted.
std::atomic<int> port_count{0};
std::atomic<uint16_t> ports[kMostPorts];

bool is_port_of_ours(uint16_t port) {
    for (int i = 0; i < port_count && i < kMostPorts; ++i) {
        if (ports[i] == port) return true;
    }
    return false;
}

// Seconds that MPI has waited so far, by the connection's descriptor. accept() sets it to 0.
std::atomic<double> waited_of[kMostConnections];

double seconds_now() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// An address as the kernel's tables print it: words of four bytes, each as this machine stores a number.
Address read_row(const char* text, unsigned port) {
    unsigned char bytes[16] = {};
    const size_t words = std::strlen(text) / 8;
    for (size_t i = 0; i < words && i < 4; ++i) {
        char word[9] = "";
        std::memcpy(word, text + 8 * i, 8);
        const auto number = static_cast<uint32_t>(std::strtoul(word, nullptr, 16));
        std::memcpy(bytes + 4 * i, &number, sizeof number);
    }
    if (words == 4) return read_ipv6(bytes, static_cast<uint16_t>(port));
    Address found;
    found.family = AF_INET;
    std::memcpy(found.bytes, bytes, 4);
    found.port = static_cast<uint16_t>(port);
    return found;
}

enum class Owner : uint8_t { trusted, other, unknown };

// Whether this user, or root, has the socket at the other end of a connection inside this host, by the kernel's tables.
// If its process has closed the socket, it has no inode and the table says root: its user is then unknown.
Owner owner_of(const Address& peer, const Address& own) {
    Owner found = Owner::unknown;  // if neither table can be read
    for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        FILE* const file = std::fopen(table, "re");
        if (!file) continue;
        if (found == Owner::unknown) found = Owner::other;
        char line[512];
        while (found == Owner::other && std::fgets(line, sizeof line, file)) {
            char local[33] = "", remote[33] = "";
            unsigned local_port = 0, remote_port = 0;
            unsigned long user = 0, inode = 0;
            // sl local_address rem_address st tx_queue:rx_queue tr:when retrnsmt uid timeout inode ...
            if (std::sscanf(line, " %*[^:]: %32[0-9A-Fa-f]:%x %32[0-9A-Fa-f]:%x %*x %*[^ ] %*[^ ] %*x %lu %*d %lu",
                            local, &local_port, remote, &remote_port, &user, &inode) != 6 ||
                inode == 0 || local_port != peer.port || remote_port != own.port ||
                !same(read_row(local, local_port), peer) || !same(read_row(remote, remote_port), own)) {
                continue;
            }
            if (user == 0 || user == geteuid()) found = Owner::trusted;
        }
        std::fclose(file);
    }
    return found;
}

bool may_enter(int listener, int fd) {
    sockaddr_storage theirs{}, ours{}, listens{};
    socklen_t length = sizeof theirs;
    // It was reset, but the data that it sent can still be read.
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &length) != 0) return false;
    length = sizeof ours;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &length) != 0) return false;
    const Address peer = read(theirs), own = read(ours);
    if (peer.family == AF_UNSPEC) return true;  // a Unix socket
    length = sizeof listens;
    if (getsockname(listener, reinterpret_cast<sockaddr*>(&listens), &length) != 0) return false;
    if (is_unspecified(read(listens)) && !is_loopback(own) && !lies_in_any(own.family, own.bytes)) return false;
    if (!is_loopback(peer) && !same(peer, own)) return true;  // it came in through one of the networks
    const Owner owner = owner_of(peer, own);
    static std::atomic<bool> said{false};
    if (owner == Owner::unknown && !said.exchange(true)) {
        std::fprintf(stderr,
                     "ddlrun: warning: neither /proc/net/tcp nor /proc/net/tcp6 can be read, so connections of other "
                     "users of this host to MPI's ports are not refused\n");
    }
    return owner != Owner::other;
}

// Returns the new connection, or in its place an unconnected TCP socket that is shut down: MPI reads end of file from
// it at once, and can set its options. (Shutting down the connection itself would leave its received data readable.)
int accepted(int listener, int fd) {
    if (fd < kMostConnections) waited_of[fd] = 0;
    if (may_enter(listener, fd)) return fd;
    const int ended = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool replaced = false;
    if (ended >= 0) {
        char byte = 0;
        shutdown(ended, SHUT_RDWR);  // takes effect even though it fails with ENOTCONN
        replaced = recv(ended, &byte, 1, MSG_DONTWAIT) == 0 && dup3(ended, fd, O_CLOEXEC) == fd;
        close(ended);
    }
    if (replaced) return fd;
    close(fd);
    errno = ECONNABORTED;
    return -1;
}

const in_addr kLoopback = {htonl(INADDR_LOOPBACK)};

// Replaces "all addresses" by this host's address in the networks, or by loopback if it has none there. If it has
// several, it keeps listening on all addresses, and accept() checks the address at which a connection came in.
void narrow(int family, void* address, const void* loopback, size_t bytes) {
    unsigned char first[16] = {};
    const int count = own_addresses(family, first);
    const bool is_local = family == AF_INET ? first[0] == 127 : std::memcmp(first, loopback, bytes) == 0;
    if (count == 0) {
        std::memcpy(address, loopback, bytes);
    } else if (count == 1 || is_local) {
        std::memcpy(address, first, bytes);
    }
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int bind(int fd, const sockaddr* address, socklen_t length) {
    static const auto real = next<int (*)(int, const sockaddr*, socklen_t)>("bind");
    if (!address || !is_mpis(__builtin_return_address(0))) return real(fd, address, length);
    sockaddr_storage changed{};
    std::memcpy(&changed, address, length < sizeof changed ? length : sizeof changed);
    if (address->sa_family == AF_INET) {
        auto& four = reinterpret_cast<sockaddr_in&>(changed);
        if (four.sin_addr.s_addr == htonl(INADDR_ANY)) narrow(AF_INET, &four.sin_addr, &kLoopback, sizeof kLoopback);
    } else if (address->sa_family == AF_INET6) {
        auto& six = reinterpret_cast<sockaddr_in6&>(changed);
        if (IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr)) {
            narrow(AF_INET6, &six.sin6_addr, &in6addr_loopback, sizeof in6addr_loopback);
        }
    }
    int result = real(fd, reinterpret_cast<const sockaddr*>(&changed), length);
    auto& six = reinterpret_cast<sockaddr_in6&>(changed);
    if (result != 0 && errno == EADDRNOTAVAIL && address->sa_family == AF_INET6 &&
        IN6_IS_ADDR_LOOPBACK(&six.sin6_addr)) {
        // IPv6 is off on this host, and MPI would fail because it cannot listen. So it listens at an IPv4 address.
        const int off = 0;
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        inet_pton(AF_INET6, "::ffff:127.0.0.1", &six.sin6_addr);
        result = real(fd, reinterpret_cast<const sockaddr*>(&changed), length);
    }
    sockaddr_storage bound{};
    socklen_t bound_length = sizeof bound;
    if (result == 0 && getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &bound_length) == 0) {
        const int at = port_count++;
        if (at < kMostPorts) ports[at] = read(bound).port;
    }
    return result;
}

__attribute__((visibility("default"))) int accept(int fd, sockaddr* address, socklen_t* length) {
    static const auto real = next<int (*)(int, sockaddr*, socklen_t*)>("accept");
    const int made = real(fd, address, length);
    return made >= 0 && is_mpis(__builtin_return_address(0)) ? accepted(fd, made) : made;
}

__attribute__((visibility("default"))) int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
    static const auto real = next<int (*)(int, sockaddr*, socklen_t*, int)>("accept4");
    const int made = real(fd, address, length, flags);
    return made >= 0 && is_mpis(__builtin_return_address(0)) ? accepted(fd, made) : made;
}

__attribute__((visibility("default"))) ssize_t recv(int fd, void* data, size_t bytes, int flags) {
    static const auto real = next<ssize_t (*)(int, void*, size_t, int)>("recv");
    if ((flags & (MSG_DONTWAIT | MSG_PEEK)) != 0 || port_count == 0) return real(fd, data, bytes, flags);
    sockaddr_storage ours{};
    socklen_t length = sizeof ours;
    const int modes = fcntl(fd, F_GETFL);
    const bool named = getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &length) == 0;
    if (!named || modes < 0 || (modes & O_NONBLOCK) != 0 || !is_port_of_ours(read(ours).port) ||
        !is_mpis(__builtin_return_address(0))) {
        return real(fd, data, bytes, flags);
    }
    // The read would wait, with MSG_WAITALL for all bytes. MPI reads a message in pieces, as they arrive, so the limit
    // is for all reads together.
    static std::atomic<double> hurries_until{0};
    std::atomic<double> once{0};
    std::atomic<double>& waited = fd < kMostConnections ? waited_of[fd] : once;
    size_t received = 0;
    while (received < bytes) {
        pollfd wait{fd, POLLIN, 0};
        // The shorter limit is for one read: earlier waits of a connection must not count against it.
        const double begin = seconds_now(), hurry = begin < hurries_until ? kHurrySeconds : kSaySeconds;
        const double left = std::min(hurry, kSaySeconds - waited.load());
        const int ready = left > 0 ? poll(&wait, 1, static_cast<int>(left * 1000) + 1) : poll(&wait, 1, 0);
        const double now = seconds_now();
        waited = waited + now - begin;
        if (ready < 0 && errno == EINTR) continue;
        if (ready == 0) {
            hurries_until = now + kHurriedSeconds;
            shutdown(fd, SHUT_RDWR);
            return 0;  // as if the peer had closed it
        }
        const ssize_t count = real(fd, static_cast<char*>(data) + received, bytes - received, flags & ~MSG_WAITALL);
        if (count <= 0) return received > 0 ? static_cast<ssize_t>(received) : count;
        received += static_cast<size_t>(count);
        if ((flags & MSG_WAITALL) == 0) break;
    }
    return static_cast<ssize_t>(received);
}

}  // extern "C"
