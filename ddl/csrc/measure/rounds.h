// Which hosts talk at once while links are measured. Pure.
//
// A rack's uplink is slower than its hosts together, which a single pair of hosts cannot see: it has the uplink to
// itself. So the probe lets pairs talk at once. In a round every host talks to at most one other, both ways; over the
// rounds the pairs are shuffled, so that in some rounds many of a rack's hosts talk to other racks, and share its
// uplink.
#pragma once

#include <utility>
#include <vector>

namespace ddl {

using Pairs = std::vector<std::pair<int, int>>;  // (lower, higher) number of a host

// Which pairs talk at once, round by round: first every pair once, as far as there are rounds, then shuffled pairs. The
// same on every rank, without a word between them. With an odd number of hosts one rests in each round. At most
// kMostRounds; none for one host.
constexpr int kMostRounds = 24;
std::vector<Pairs> probe_rounds(int hosts);

}  // namespace ddl
