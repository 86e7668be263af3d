// Finds the hosts that share a rack, from bandwidths measured in the rounds of rounds.h. Pure.
//
// A partition of the hosts into racks predicts each flow of each round: links have one rate, and each rack has an
// uplink that its flows share fairly. The answer is the partition that explains the flows best, with few racks. A
// single flow that is off by 10% decides nothing, because all flows of all rounds count; a flow that is far off (a lost
// packet) counts less than by its square.
//
// Nothing is claimed that bandwidths cannot show. Uplinks that carry all that their hosts can send make no tier. If
// every rack has one host, uplinks look like slower links, and the answer is one rack: both cases are reduced in the
// same way. Latency is reported for each tier but decides nothing: switches differ by less than a kernel's noise.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddl {

// The measured flow from one host to another in a round.
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

using Racks = std::vector<std::vector<int>>;  // hosts by their numbers, ascending; racks by their first host

struct Tiers {
    Racks racks;
    double link = 0;              // bytes per second and direction, of a host within its rack
    std::vector<double> uplinks;  // of each rack, for all its hosts together; empty if there is one rack
    double near = 0, far = 0;     // latency in seconds within a rack, and between racks; 0: not measured
    std::string reason;           // a clause in words
};

// The racks that explain the flows best. Up to 8 hosts every partition is tried; more are searched from several starts
// with bounded effort (about two seconds), and `reason` says so. Throws Error(DDL_ERROR_ARGUMENT) for
// a bandwidth that is not above 0.
Tiers find_tiers(const Measurement& measured);

}  // namespace ddl
