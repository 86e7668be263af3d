// The addresses and ports at which a rank listens, and those by which others reach it.
//
// The environment narrows them: DDL_SOCKET_IFNAME by interfaces, DDL_NETWORKS by networks, DDL_PORT_RANGE by ports.
// DDL_ADVERTISE adds an address that others reach this host by and that no interface has. Everything here throws
// Error(DDL_ERROR_ARGUMENT) if a variable cannot be read, or leaves no address.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/socket.h"

namespace ddl {

// A numeric address, which may be a dead end for others, and a port.
struct Endpoint {
    std::string address;
    uint16_t port = 0;
};
using Contact = std::vector<Endpoint>;

constexpr const char* kLoopbackAddress = "127.0.0.1";

// "10.0.0.1 40000 fd00::1 40001 ", and back. The text has at most `most` bytes: addresses that do not fit are left out.
std::string to_text(const Contact& contact, size_t most);
Contact contact_of(const std::string& text);

// Equal on processes that reach one another through the loopback interface; "" if that is not known.
std::string network_space();

// An interface that is up, with its addresses.
struct Interface {
    std::string name;
    bool is_loopback = false;
    std::vector<std::string> addresses;  // numeric; a link-local one with its interface
};
std::vector<Interface> interfaces_of_host();

// Which of them are meant by `names`, as DDL_SOCKET_IFNAME has them ("" : any but loopback), and `networks`, as
// DDL_NETWORKS has them ("": any): their addresses, those of IPv4 first. Link-local addresses count only if nothing
// else is left or `networks` names theirs.
std::vector<std::string> choose_addresses(const std::vector<Interface>& interfaces, const std::string& names,
                                          const std::string& networks);
// The same with the environment's. If a variable is set and leaves nothing, the error lists the host's interfaces.
std::vector<std::string> addresses_for_other_hosts();

// Listening sockets, and the contact by which others reach them.
struct Door {
    std::vector<Socket> listeners;
    Contact contact;
};
// Listens at those of these addresses that can be had, at ports in DDL_PORT_RANGE if that is set. Throws
// Error(DDL_ERROR_TRANSPORT) if there is none.
Door open_door(const std::vector<std::string>& addresses);

// The addresses to try for an endpoint: one, but for a link-local address one through each interface of this host.
std::vector<std::string> ways_to(const Endpoint& endpoint);

}  // namespace ddl
