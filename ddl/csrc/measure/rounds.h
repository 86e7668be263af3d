// The rounds of a measurement: which hosts exchange data at once. Pure.
//
// A rack's uplink is slower than its hosts together. A single pair of hosts cannot see this, because it has the uplink
// to itself. So many pairs exchange data at once. In a round every host has at most one partner. The pairs are shuffled
// over the rounds, so that in some rounds many hosts of a rack have partners in other racks, and share the uplink.
#pragma once

#include <utility>
#include <vector>

namespace ddl {

using Pairs = std::vector<std::pair<int, int>>;  // (lower, higher) number of a host

// The pairs of each round: first every pair once, as far as the rounds go, then shuffled pairs. Every rank computes the
// same without communication. With an odd number of hosts, one has no partner in each round. At most kMostRounds; none
// for one host.
constexpr int kMostRounds = 24;
std::vector<Pairs> probe_rounds(int hosts);

}  // namespace ddl
