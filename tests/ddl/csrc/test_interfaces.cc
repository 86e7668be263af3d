// Which of a host's addresses are used, as the environment says.
#include <cstdlib>

#include "base/status.h"
#include "check.h"
#include "transport/interfaces.h"

using namespace ddl;

namespace {

using Texts = std::vector<std::string>;

const std::vector<Interface> kHost = {
    {"lo", true, {"127.0.0.1", "::1"}}, {"eth0", false, {"fe80::1%eth0", "fd00::2", "10.0.0.2"}},
    {"eth01", false, {"10.1.0.2"}},     {"docker0", false, {"172.17.0.1"}},
    {"ib0", false, {"fe80::5%ib0"}},
};

// For as long as this lives.
struct Variable {
    Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
    ~Variable() { unsetenv(name_); }
    const char* const name_;
};

}  // namespace

TEST("all addresses are used but those of loopback and of one link, IPv4 first") {
    CHECK(choose_addresses(kHost, "", "") == Texts({"10.0.0.2", "10.1.0.2", "172.17.0.1", "fd00::2"}));
}

TEST("interfaces are named by how they begin, exactly, or excluded") {
    CHECK(choose_addresses(kHost, "eth0", "") == Texts({"10.0.0.2", "10.1.0.2", "fd00::2"}));
    CHECK(choose_addresses(kHost, "=eth0", "") == Texts({"10.0.0.2", "fd00::2"}));
    CHECK(choose_addresses(kHost, "=eth01,docker0", "") == Texts({"10.1.0.2", "172.17.0.1"}));
    CHECK(choose_addresses(kHost, "^docker,eth01", "") == Texts({"10.0.0.2", "fd00::2"}));
    CHECK(choose_addresses(kHost, "^=eth0,docker0", "") == Texts({"10.1.0.2"}));
    CHECK(choose_addresses(kHost, "lo", "") == Texts({"127.0.0.1", "::1"}));
    CHECK(choose_addresses(kHost, "wlan", "").empty());
}

TEST("a link-local address is used if it is the only one, or its network is named") {
    CHECK(choose_addresses(kHost, "ib", "") == Texts({"fe80::5%ib0"}));
    CHECK(choose_addresses(kHost, "", "fe80::/10") == Texts({"fe80::1%eth0", "fe80::5%ib0"}));
}

TEST("networks narrow the addresses, beside the interfaces") {
    CHECK(choose_addresses(kHost, "", "127.0.0.0/8") == Texts({"127.0.0.1"}));
    CHECK(choose_addresses(kHost, "", "127.0.0.1/32, 192.0.2.128/25") == Texts({"127.0.0.1"}));
    CHECK(choose_addresses(kHost, "eth", "10.1.0.0/16,fd00::/8") == Texts({"10.1.0.2", "fd00::2"}));
    CHECK(choose_addresses(kHost, "docker", "10.1.0.0/16").empty());
    for (const char* wrong : {"10.0.0.0", "10.0.0.0/33", "10.0.0/8", "eth0/8", "fd00::/129", "10.0.0.0/8x", "/8"}) {
        CHECK_CONTAINS(check::message_of<Error>([&] { choose_addresses(kHost, "", wrong); }),
                       std::string("DDL_NETWORKS has '") + wrong + "'");
    }
}

TEST("if the environment leaves no address, the error lists the interfaces") {
    const Variable names("DDL_SOCKET_IFNAME", "nosuch");
    const std::string said = check::message_of<Error>([] { addresses_for_other_hosts(); });
    CHECK_CONTAINS(said, "DDL_SOCKET_IFNAME 'nosuch' leaves no address of this host. Its interfaces: ");
    CHECK_CONTAINS(said, "lo (127.0.0.1");
}

TEST("ports are those of the range, and an error says that none is free") {
    Door first;
    {
        const Variable range("DDL_PORT_RANGE", "23400-23499");
        first = open_door({"127.0.0.1"});
        const Door second = open_door({"127.0.0.1"});
        CHECK(first.contact[0].port >= 23400 && first.contact[0].port < second.contact[0].port);
        CHECK(second.contact[0].port <= 23499);
    }
    const std::string one = std::to_string(first.contact[0].port);
    const Variable range("DDL_PORT_RANGE", (one + "-" + one).c_str());
    CHECK_CONTAINS(check::message_of<Error>([] { open_door({"127.0.0.1"}); }),
                   "127.0.0.1 (Address already in use), with DDL_PORT_RANGE " + one + "-" + one);
    for (const char* wrong : {"5", "5-", "6-5", "1-65536", "0-5", "5-6x", "a-b"}) {
        const Variable bad("DDL_PORT_RANGE", wrong);
        CHECK_CONTAINS(check::message_of<Error>([] { open_door({"127.0.0.1"}); }),
                       std::string("DDL_PORT_RANGE is '") + wrong + "'");
    }
}

TEST("an advertised address is told with the ports of those that others may reach") {
    const Variable advertised("DDL_ADVERTISE", "198.51.100.7");
    const Door door = open_door({"127.0.0.1", "::1"});
    CHECK_EQ(door.contact.size(), door.listeners.size());  // loopback is no address for others
    const Variable wrong("DDL_ADVERTISE", "gateway");
    CHECK_CONTAINS(check::message_of<Error>([] { open_door({"127.0.0.1"}); }), "DDL_ADVERTISE is 'gateway'");
}

TEST("a contact is the same when it was written and read") {
    const Contact contact = {{"10.0.0.1", 40000}, {"fe80::1%eth0", 1}, {"fd00::1", 65535}};
    const Contact read = contact_of(to_text(contact, 100));
    CHECK_EQ(read.size(), size_t{3});
    for (size_t i = 0; i < read.size(); ++i) {
        CHECK_EQ(read[i].address, contact[i].address);
        CHECK_EQ(read[i].port, contact[i].port);
    }
    CHECK_EQ(contact_of(to_text(contact, 20)).size(), size_t{1});
    CHECK(contact_of("10.0.0.1").empty());
}
