#include <netinet/in.h>

#include <string>

#include "base/ip_network.h"
#include "check.h"

using namespace ddl;

namespace {

// Whether `address` lies in `network`. Both can be read.
bool lies_in(const std::string& network, const std::string& address) {
    IpNetwork its;
    CHECK(read_network(network.data(), network.size(), &its));
    const int family = address.find(':') == std::string::npos ? AF_INET : AF_INET6;
    in6_addr bytes{};  // large enough for both families
    CHECK_EQ(inet_pton(family, address.c_str(), &bytes), 1);
    return its.contains(family, &bytes);
}

}  // namespace

TEST("a network contains the addresses that begin with its bits") {
    CHECK(lies_in("10.1.2.0/24", "10.1.2.255"));
    CHECK(!lies_in("10.1.2.0/24", "10.1.3.0"));
    CHECK(lies_in("10.1.2.128/25", "10.1.2.129"));
    CHECK(!lies_in("10.1.2.128/25", "10.1.2.127"));
    CHECK(lies_in("10.1.2.3/32", "10.1.2.3"));
    CHECK(!lies_in("10.1.2.3/32", "10.1.2.2"));
    CHECK(lies_in("0.0.0.0/0", "192.0.2.1"));
    CHECK(lies_in("fd00::/8", "fdff::1"));
    CHECK(!lies_in("fd00::/8", "fe00::1"));
    CHECK(lies_in("::1/128", "::1"));
    CHECK(!lies_in("::/0", "10.1.2.3"));
    CHECK(!lies_in("0.0.0.0/0", "::1"));
}

TEST("only the given characters are read") {
    IpNetwork network;
    CHECK(read_network("10.0.0.0/24,rest", 11, &network));
    CHECK_EQ(network.bits, 24);
    CHECK(read_network("10.0.0.0/24,rest", 10, &network));
    CHECK_EQ(network.bits, 2);
}

TEST("what is no network is refused") {
    const std::string longest = "ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255/128";
    IpNetwork network;
    CHECK(read_network(longest.data(), longest.size(), &network));
    for (const std::string& wrong :
         {std::string(), std::string("10.0.0.0"), std::string("10.0.0.0/"), std::string("10.0.0.0/33"),
          std::string("10.0.0.0/-1"), std::string("10.0.0.0/ 8"), std::string("10.0.0.0/+8"), std::string("10.0.0/8"),
          std::string("eth0/8"), std::string("fd00::/129"), std::string("10.0.0.0/8x"), std::string("/8"),
          std::string("10.0.0.0/4294967304"), longest + "0"}) {
        CHECK(!read_network(wrong.data(), wrong.size(), &network));
    }
}
