// The CPUs that the ranks of a host may run on. A launcher, a batch system or a container may give them only some of
// the host's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddl {

constexpr size_t kMostCores = 1024;

// A bit for each CPU, by number. Sent over the wire as it is.
struct CoreSet {
    uint64_t words[kMostCores / 64] = {};
};

// The CPUs that the calling thread may run on; if the system does not say, all that it has.
CoreSet own_cores();

// The number of CPUs in the union of the sets.
int count_cores(const std::vector<CoreSet>& sets);

}  // namespace ddl
