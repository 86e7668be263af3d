// IP networks, as in DDL_NETWORKS and DDL_DOOR. This needs only the C library, because the port filter uses it too, and
// is loaded into other programs.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

namespace ddl {

struct IpNetwork {
    int family = AF_UNSPEC;
    unsigned char bytes[16] = {};  // of the address
    int bits = 0;                  // prefix length

    // `address` is an in_addr or an in6_addr, according to `its_family`.
    bool contains(int its_family, const void* address) const {
        if (its_family != family) return false;
        const auto* theirs = static_cast<const unsigned char*>(address);
        const int whole = bits / 8, rest = bits % 8;
        if (std::memcmp(theirs, bytes, static_cast<size_t>(whole)) != 0) return false;
        return rest == 0 || ((theirs[whole] ^ bytes[whole]) >> (8 - rest)) == 0;
    }
};

// Reads `length` characters such as "10.0.0.0/24" or "fd00::/8". False if they are not a network.
inline bool read_network(const char* text, size_t length, IpNetwork* network) {
    char copy[INET6_ADDRSTRLEN + sizeof "/128"] = "";
    if (length >= sizeof copy) return false;
    std::memcpy(copy, text, length);
    char* const slash = std::strchr(copy, '/');
    if (!slash || slash[1] < '0' || slash[1] > '9') return false;
    *slash = '\0';
    network->family = std::strchr(copy, ':') ? AF_INET6 : AF_INET;
    char* end = nullptr;
    const long bits = std::strtol(slash + 1, &end, 10);
    network->bits = static_cast<int>(bits);
    return *end == '\0' && bits <= (network->family == AF_INET ? 32 : 128) &&
           inet_pton(network->family, copy, network->bytes) == 1;
}

}  // namespace ddl
