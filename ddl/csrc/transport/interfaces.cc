#include "transport/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "base/ip_network.h"
#include "base/status.h"

namespace ddl {
namespace {

std::string variable(const char* name) {
    const char* const text = std::getenv(name);
    return text ? text : "";
}

std::vector<std::string> words_of(std::string text) {
    std::replace(text.begin(), text.end(), ',', ' ');
    std::istringstream stream(text);
    std::vector<std::string> all;
    for (std::string word; stream >> word;) all.push_back(word);
    return all;
}

// An address as the kernel has it.
struct Parsed {
    int family = AF_UNSPEC;  // none: it cannot be read
    unsigned char bytes[16] = {};

    explicit Parsed(const std::string& address) {
        const std::string plain = address.substr(0, address.find('%'));
        for (const int one : {AF_INET, AF_INET6}) {
            if (inet_pton(one, plain.c_str(), bytes) == 1) family = one;
        }
    }
    bool is_link_local() const { return family == AF_INET6 && bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80; }
    bool is_loopback() const {
        return family == AF_INET ? bytes[0] == 127 : std::memcmp(bytes, &in6addr_loopback, sizeof bytes) == 0;
    }
};

IpNetwork parse_network(const std::string& text) {
    IpNetwork network;
    if (read_network(text.data(), text.size(), &network)) return network;
    throw Error(DDL_ERROR_ARGUMENT,
                "DDL_NETWORKS has '" + text + "', but must be networks by commas, such as 10.0.0.0/24 or fd00::/8");
}

// As NCCL_SOCKET_IFNAME: "eth,ib" names interfaces by how they begin, "=eth0" by the whole name; "^" before all of them
// excludes them.
bool is_named(const std::string& interface, std::string names) {
    const bool excludes = names[0] == '^';
    if (excludes) names.erase(0, 1);
    const bool exact = names[0] == '=';
    if (exact) names.erase(0, 1);
    const std::vector<std::string> all = words_of(names);
    const bool found = std::any_of(all.begin(), all.end(), [&](const std::string& name) {
        return exact ? interface == name : interface.compare(0, name.size(), name) == 0;
    });
    return found != excludes;
}

struct Ports {
    int first = 0, last = 0;
};

// 0 to 0: the kernel chooses.
Ports ports_of_environment() {
    const std::string text = variable("DDL_PORT_RANGE");
    if (text.empty()) return {};
    Ports ports;
    char dash = 0, rest = 0;
    std::istringstream stream(text);
    const bool read = static_cast<bool>(stream >> ports.first >> dash >> ports.last) && !(stream >> rest);
    if (read && dash == '-' && ports.first >= 1 && ports.first <= ports.last && ports.last <= 65535) return ports;
    throw Error(DDL_ERROR_ARGUMENT,
                "DDL_PORT_RANGE is '" + text + "', but must be two ports and a dash, such as 40000-40100");
}

Socket listen_in(const Ports& ports, const std::string& address, uint16_t* port) {
    for (int one = ports.first; one <= ports.last; ++one) {
        *port = static_cast<uint16_t>(one);
        Socket made = listen_at(address, port);
        if (made || errno != EADDRINUSE) return made;
    }
    return {};
}

}  // namespace

std::string to_text(const Contact& contact, size_t most) {
    std::string text;
    for (const Endpoint& one : contact) {
        const std::string more = one.address + " " + std::to_string(one.port) + " ";
        if (text.size() + more.size() <= most) text += more;
    }
    return text;
}

Contact contact_of(const std::string& text) {
    Contact contact;
    std::istringstream stream(text);
    Endpoint one;
    for (int port = 0; stream >> one.address >> port;) {
        one.port = static_cast<uint16_t>(port);
        contact.push_back(one);
    }
    return contact;
}

std::string network_space() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    char space[64] = "";
    if (boot.empty() || readlink("/proc/self/ns/net", space, sizeof space - 1) <= 0) return "";
    return boot + space;
}

std::vector<Interface> interfaces_of_host() {
    ifaddrs* found = nullptr;
    if (getifaddrs(&found) != 0) return {};
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(found, freeifaddrs);
    std::vector<Interface> all;
    for (const ifaddrs* entry = found; entry; entry = entry->ifa_next) {
        if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP)) continue;
        const int family = entry->ifa_addr->sa_family;
        if (family != AF_INET && family != AF_INET6) continue;
        char text[INET6_ADDRSTRLEN + IF_NAMESIZE + 1] = "";
        const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
        // It adds the interface to a link-local address.
        if (getnameinfo(entry->ifa_addr, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) continue;
        const auto same = [&](const Interface& one) { return one.name == entry->ifa_name; };
        auto known = std::find_if(all.begin(), all.end(), same);
        if (known == all.end()) {
            all.push_back({entry->ifa_name, (entry->ifa_flags & IFF_LOOPBACK) != 0, {}});
            known = all.end() - 1;
        }
        known->addresses.emplace_back(text);
    }
    return all;
}

std::vector<std::string> choose_addresses(const std::vector<Interface>& interfaces, const std::string& names,
                                          const std::string& networks) {
    std::vector<IpNetwork> wanted;
    for (const std::string& network : words_of(networks)) wanted.push_back(parse_network(network));
    std::vector<std::string> found[3];  // of IPv4, of IPv6, link-local
    for (const Interface& one : interfaces) {
        if (!names.empty() && !is_named(one.name, names)) continue;
        const bool is_meant = !names.empty() && names[0] != '^';
        if (one.is_loopback && !is_meant && wanted.empty()) continue;
        for (const std::string& address : one.addresses) {
            const Parsed parsed(address);
            const bool is_wanted = std::any_of(wanted.begin(), wanted.end(), [&](const IpNetwork& network) {
                return network.contains(parsed.family, parsed.bytes);
            });
            if (!wanted.empty() && !is_wanted) continue;
            const bool is_last = parsed.is_link_local() && wanted.empty();
            found[is_last ? 2 : parsed.family == AF_INET6].push_back(address);
        }
    }
    std::vector<std::string>& all = found[0];
    all.insert(all.end(), found[1].begin(), found[1].end());
    return all.empty() ? found[2] : all;
}

std::vector<std::string> addresses_for_other_hosts() {
    const std::string names = variable("DDL_SOCKET_IFNAME"), networks = variable("DDL_NETWORKS");
    const std::vector<Interface> interfaces = interfaces_of_host();
    std::vector<std::string> chosen = choose_addresses(interfaces, names, networks);
    if (!chosen.empty() || (names.empty() && networks.empty())) return chosen;
    std::string said, all;
    if (!names.empty()) said = "DDL_SOCKET_IFNAME '" + names + "'";
    if (!networks.empty()) said += (said.empty() ? "" : " and ") + ("DDL_NETWORKS '" + networks + "'");
    for (const Interface& one : interfaces) {
        all += (all.empty() ? "" : ", ") + one.name + " (";
        for (const std::string& address : one.addresses) all += (all.back() == '(' ? "" : " ") + address;
        all += ")";
    }
    throw Error(DDL_ERROR_ARGUMENT, "ddl_init: " + said + " leaves no address of this host. Its interfaces: " +
                                        (all.empty() ? "none" : all));
}

Door open_door(const std::vector<std::string>& addresses) {
    const Ports ports = ports_of_environment();
    Door door;
    std::string all, why;
    for (const std::string& address : addresses) {
        uint16_t port = 0;
        Socket listener = listen_in(ports, address, &port);
        if (listener) {
            door.listeners.push_back(std::move(listener));
            door.contact.push_back({address, port});
            continue;
        }
        why = std::strerror(errno);
        all += (all.empty() ? "" : ", ") + address;
    }
    if (door.listeners.empty()) {
        const std::string range = variable("DDL_PORT_RANGE");
        throw Error(DDL_ERROR_TRANSPORT,
                    "no TCP port to listen at, by which ranks reach one another, at any of these "
                    "addresses of this host: " +
                        (all.empty() ? "none" : all + " (" + why + ")") +
                        (range.empty() ? "" : ", with DDL_PORT_RANGE " + range));
    }
    const std::string advertised = variable("DDL_ADVERTISE");
    if (advertised.empty()) return door;
    const Parsed parsed(advertised);
    if (parsed.family == AF_UNSPEC) {
        throw Error(DDL_ERROR_ARGUMENT, "DDL_ADVERTISE is '" + advertised + "', but must be a numeric address");
    }
    const Contact own = door.contact;
    for (const Endpoint& one : own) {
        if (!Parsed(one.address).is_loopback()) door.contact.push_back({advertised, one.port});
    }
    return door;
}

std::vector<std::string> ways_to(const Endpoint& endpoint) {
    if (!Parsed(endpoint.address).is_link_local()) return {endpoint.address};
    // The other host's name of its interface means nothing here.
    const std::string plain = endpoint.address.substr(0, endpoint.address.find('%'));
    std::vector<std::string> ways;
    for (const Interface& one : interfaces_of_host()) {
        if (!one.is_loopback) ways.push_back(plain + "%" + one.name);
    }
    return ways;
}

}  // namespace ddl
