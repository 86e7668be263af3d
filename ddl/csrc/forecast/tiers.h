// Which hosts share a rack, from the bandwidths that were measured by the rounds of rounds.h. Pure.
//
// What was seen is explained: a partition of the hosts into racks predicts each flow of each round (links of one
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

using Racks = std::vector<std::vector<int>>;  // hosts by their numbers, ascending; racks by their first host

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
