// Which hosts share a rack, from measured bandwidths. Pure: the plan of the measurement, and what follows from it.
//
// A rack's uplink is slower than its hosts together, which a single pair of hosts cannot see: it has the uplink to
// itself. So the probe lets pairs talk at once. In a round every host talks to at most one other, both ways; over the
// rounds the pairs are shuffled, so that in some rounds many of a rack's hosts talk to other racks, and share its
// uplink.
//
// What was seen is then explained: a partition of the hosts into racks predicts each flow of each round (links of one
// rate, an uplink a rack, shared fairly by the flows that cross it), and the partition that explains the flows best,
// with few racks, is the answer. A single flow that is off by 10% decides nothing, because all flows of all rounds have
// a say; one that is off by far (a packet was lost) counts less than by its square.
//
// What cannot be told from bandwidths is not claimed. Uplinks that carry all that their hosts can send are no tier.
// Where every rack has one host, uplinks look like slower links, and hosts with equal ones are answered as one rack:
// both are reduced in the same way. Latency is reported for each tier and decides nothing: between switches it differs
// by less than the noise of a kernel.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddl {

// What a round saw from one host to another.
struct Flow {
    int source = 0, target = 0;  // numbers of hosts
    double bandwidth = 0;        // bytes per second
    double latency = 0;          // seconds for a small message to go there; 0: not measured
};

// Flows between `hosts` hosts, in rounds: those of one round were in flight together.
struct Measurement {
    int hosts = 0;
    std::vector<std::vector<Flow>> rounds;
};

using Pairs = std::vector<std::pair<int, int>>;  // (lower, higher) number of a host
using Racks = std::vector<std::vector<int>>;     // hosts by their numbers, ascending; racks by their first host

// Which pairs talk at once, round by round: first every pair once, as far as there are rounds, then shuffled pairs. The
// same on every rank, without a word between them. With an odd number of hosts one rests in each round. At most
// kMostRounds; none for one host.
constexpr int kMostRounds = 24;
std::vector<Pairs> probe_rounds(int hosts);

struct Tiers {
    Racks racks;
    double link = 0;              // bytes per second and direction, of a host within its rack
    std::vector<double> uplinks;  // of each rack, for all its hosts together; empty where there is one rack
    double near = 0, far = 0;     // latency in seconds within a rack, and between racks; 0: not measured
    std::string reason;           // a clause for people
};

// The racks that explain the flows best. Up to 8 hosts every partition is tried; more are searched from several starts
// with bounded effort (about two seconds), and `reason` says so. Throws Error(DDL_ERROR_ARGUMENT) for
// a bandwidth that is not above 0.
Tiers find_tiers(const Measurement& measured);

}  // namespace ddl
