// libddl_doorkeeper.so, which ddlrun has loaded into MPI's launcher (LD_PRELOAD): who can connect to MPI's ports.
//
// Open MPI and MPICH listen on all addresses of a host, and have no option against it. Their first read from whoever
// connects waits for ever. So, for the sockets of MPI's own libraries and programs alone:
//
// - bind(): the ports lie in the networks of DDL_DOOR ("10.0.0.0/24,..."), and in the loopback interface's alone if
// that
//   is what it names;
// - accept(): from inside the host only processes of the same user, or root's, are let in;
// - recv(): whoever was let in and does not say the rest of what MPI waits for within some seconds is shown out.
//
// It needs nothing but the C library: it is loaded into programs that know nothing of it.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <initializer_list>

namespace {

constexpr int kMostNetworks = 16, kMostPorts = 64;
constexpr double kSaySeconds = 5;       // for whoever connects to say what MPI waits for
constexpr double kHurrySeconds = 0.5;   // instead, for a while after one was shown out: they come together
constexpr double kHurriedSeconds = 60;  // how long that while is

struct Network {
    int family;
    unsigned char bytes[16];
    int bits;
};

struct Door {
    Network networks[kMostNetworks];
    int count = 0;
};

bool parse(const char* text, size_t length, Network* network) {
    char copy[INET6_ADDRSTRLEN + 5] = "";
    if (length >= sizeof copy) return false;
    std::memcpy(copy, text, length);
    char* const slash = std::strchr(copy, '/');
    if (!slash) return false;
    *slash = '\0';
    network->bits = std::atoi(slash + 1);
    network->family = std::strchr(copy, ':') ? AF_INET6 : AF_INET;
    return inet_pton(network->family, copy, network->bytes) == 1;
}

const Door& door() {
    static const Door made = [] {
        Door found;
        const char* text = std::getenv("DDL_DOOR");
        while (text && *text && found.count < kMostNetworks) {
            const size_t length = std::strcspn(text, ",");
            if (parse(text, length, &found.networks[found.count])) ++found.count;
            text += length + (text[length] == ',' ? 1 : 0);
        }
        return found;
    }();
    return made;
}

bool lies_in(const Network& network, int family, const void* address) {
    if (family != network.family) return false;
    const auto* bytes = static_cast<const unsigned char*>(address);
    const int whole = network.bits / 8, rest = network.bits % 8;
    if (std::memcmp(bytes, network.bytes, static_cast<size_t>(whole)) != 0) return false;
    return rest == 0 || ((bytes[whole] ^ network.bytes[whole]) >> (8 - rest)) == 0;
}

bool own_address(int family, void* address);

// Whether this host is in the networks. mpirun may run on one that is not, from which the others are reached otherwise.
bool is_inside() {
    static const bool found = [] {
        unsigned char any[16];
        return own_address(AF_INET, any) || own_address(AF_INET6, any);
    }();
    return found;
}

bool lies_in_any(int family, const void* address) {
    for (int i = 0; i < door().count; ++i) {
        if (lies_in(door().networks[i], family, address)) return true;
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

// Whether the code at `caller` is MPI's: a program that MPI starts has sockets of its own.
bool is_mpis(const void* caller) {
    Dl_info info{};
    if (door().count == 0 || !is_inside() || dladdr(caller, &info) == 0 || !info.dli_fname) return false;
    const char* const slash = std::strrchr(info.dli_fname, '/');
    const char* const file = slash ? slash + 1 : info.dli_fname;
    for (const char* beginning : {"libprrte", "libpmix", "libopen-", "libmpi", "mca_", "prterun", "prted", "orterun",
                                  "orted", "mpirun", "mpiexec", "hydra_pmi_proxy"}) {
        if (begins_with(file, beginning)) return true;
    }
    return false;
}

// IPv4, also where it is written as IPv6; else IPv6.
struct Address {
    int family = AF_UNSPEC;
    unsigned char bytes[16] = {};
    uint16_t port = 0;  // as the host writes it
};

Address read(const sockaddr_storage& storage) {
    Address found;
    if (storage.ss_family == AF_INET) {
        const auto& four = reinterpret_cast<const sockaddr_in&>(storage);
        found.family = AF_INET;
        std::memcpy(found.bytes, &four.sin_addr, 4);
        found.port = ntohs(four.sin_port);
    } else if (storage.ss_family == AF_INET6) {
        const auto& six = reinterpret_cast<const sockaddr_in6&>(storage);
        const bool mapped = IN6_IS_ADDR_V4MAPPED(&six.sin6_addr);
        found.family = mapped ? AF_INET : AF_INET6;
        std::memcpy(found.bytes, six.sin6_addr.s6_addr + (mapped ? 12 : 0), mapped ? 4 : 16);
        found.port = ntohs(six.sin6_port);
    }
    return found;
}

bool is_loopback(const Address& address) {
    if (address.family == AF_INET) return address.bytes[0] == 127;
    return address.family == AF_INET6 && std::memcmp(address.bytes, &in6addr_loopback, 16) == 0;
}

// This host's address in the networks; false if it has none of this family.
bool own_address(int family, void* address) {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) return false;
    bool found = false;
    for (const ifaddrs* one = all; one && !found; one = one->ifa_next) {
        if (!one->ifa_addr || one->ifa_addr->sa_family != family) continue;
        const void* its = family == AF_INET
                              ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr)
                              : &reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
        found = lies_in_any(family, its);
        if (found) std::memcpy(address, its, family == AF_INET ? 4 : 16);
    }
    freeifaddrs(all);
    return found;
}

// Ports that MPI listens at in this process: what comes in at one of them was accepted.
std::atomic<int> port_count{0};
std::atomic<uint16_t> ports[kMostPorts];

bool is_port_of_ours(uint16_t port) {
    for (int i = 0; i < port_count && i < kMostPorts; ++i) {
        if (ports[i] == port) return true;
    }
    return false;
}

double seconds_now() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// The user of the process at the other end of a connection inside this host, as the kernel's tables say; -1 if they do
// not have it.
long user_of(const Address& peer, const Address& own) {
    for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        FILE* const file = std::fopen(table, "re");
        if (!file) continue;
        char line[512];
        long user = -1;
        while (user < 0 && std::fgets(line, sizeof line, file)) {
            unsigned local = 0, remote = 0;
            long its = -1;
            // sl local_address rem_address st tx_queue:rx_queue tr:when retrnsmt uid ...
            if (std::sscanf(line, " %*[^:]: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%x %*x %*[^ ] %*[^ ] %*x %ld", &local,
                            &remote, &its) == 3 &&
                local == peer.port && remote == own.port) {
                user = its;
            }
        }
        std::fclose(file);
        if (user >= 0) return user;
    }
    return -1;
}

bool may_enter(int fd) {
    sockaddr_storage theirs{}, ours{};
    socklen_t length = sizeof theirs;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &length) != 0) return true;  // it has gone already
    length = sizeof ours;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &length) != 0) return true;
    const Address peer = read(theirs), own = read(ours);
    if (peer.family == AF_UNSPEC) return true;  // a Unix socket
    const bool inside =
        is_loopback(peer) || (peer.family == own.family && std::memcmp(peer.bytes, own.bytes, sizeof peer.bytes) == 0);
    if (!inside) return true;  // it came in by one of the networks
    const long user = user_of(peer, own);
    return user == 0 || user == static_cast<long>(geteuid());
}

// Shown out: MPI finds the connection at its end, which it knows what to do about.
int accepted(int fd) {
    if (fd >= 0 && !may_enter(fd)) shutdown(fd, SHUT_RDWR);
    return fd;
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
        const bool all = four.sin_addr.s_addr == htonl(INADDR_ANY);
        if (all && !own_address(AF_INET, &four.sin_addr)) four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else if (address->sa_family == AF_INET6) {
        auto& six = reinterpret_cast<sockaddr_in6&>(changed);
        const bool all = IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr);
        if (all && !own_address(AF_INET6, &six.sin6_addr)) six.sin6_addr = in6addr_loopback;
    }
    int result = real(fd, reinterpret_cast<const sockaddr*>(&changed), length);
    auto& six = reinterpret_cast<sockaddr_in6&>(changed);
    if (result != 0 && errno == EADDRNOTAVAIL && address->sa_family == AF_INET6 &&
        IN6_IS_ADDR_LOOPBACK(&six.sin6_addr)) {
        // IPv6 is switched off, and MPI takes it for an error that it cannot listen. So it does, where nobody connects.
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
    return is_mpis(__builtin_return_address(0)) ? accepted(made) : made;
}

__attribute__((visibility("default"))) int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
    static const auto real = next<int (*)(int, sockaddr*, socklen_t*, int)>("accept4");
    const int made = real(fd, address, length, flags);
    return is_mpis(__builtin_return_address(0)) ? accepted(made) : made;
}

__attribute__((visibility("default"))) ssize_t recv(int fd, void* data, size_t bytes, int flags) {
    static const auto real = next<ssize_t (*)(int, void*, size_t, int)>("recv");
    if ((flags & (MSG_DONTWAIT | MSG_PEEK)) != 0 || !is_mpis(__builtin_return_address(0)))
        return real(fd, data, bytes, flags);
    sockaddr_storage ours{};
    socklen_t length = sizeof ours;
    const int modes = fcntl(fd, F_GETFL);
    const bool named = getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &length) == 0;
    if (!named || modes < 0 || (modes & O_NONBLOCK) != 0 || !is_port_of_ours(read(ours).port)) {
        return real(fd, data, bytes, flags);
    }
    // It would wait. All of it, if MSG_WAITALL asks for that, within the time.
    static std::atomic<double> hurries_until{0};
    const double begin = seconds_now(), end = begin + (begin < hurries_until ? kHurrySeconds : kSaySeconds);
    size_t received = 0;
    while (received < bytes) {
        pollfd wait{fd, POLLIN, 0};
        const double left = end - seconds_now();
        const int ready = left > 0 ? poll(&wait, 1, static_cast<int>(left * 1000) + 1) : 0;
        if (ready < 0 && errno == EINTR) continue;
        if (ready == 0) {
            hurries_until = seconds_now() + kHurriedSeconds;
            shutdown(fd, SHUT_RDWR);
            return 0;  // as if the other had closed it
        }
        const ssize_t count = real(fd, static_cast<char*>(data) + received, bytes - received, flags & ~MSG_WAITALL);
        if (count <= 0) return received > 0 && count == 0 ? static_cast<ssize_t>(received) : count;
        received += static_cast<size_t>(count);
        if ((flags & MSG_WAITALL) == 0) break;
    }
    return static_cast<ssize_t>(received);
}

}  // extern "C"
