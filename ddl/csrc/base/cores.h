// The processors that the ranks of a host may run on: a launcher, a batch system or a container may give them few of
// those that there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddl {

constexpr size_t kMostCores = 1024;

// A bit for each, by its number. On the wire as it stands.
struct CoreSet {
    uint64_t words[kMostCores / 64] = {};
};

// Those that the calling thread may run on; where the system does not say, as many as it has.
CoreSet own_cores();

// How many are in any of the sets.
int count_cores(const std::vector<CoreSet>& sets);

}  // namespace ddl
