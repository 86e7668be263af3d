#include "base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace ddl {

CoreSet own_cores() {
    CoreSet cores;
    const auto add = [&](size_t core) { cores.words[core / 64] |= uint64_t{1} << core % 64; };
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        for (size_t core = 0; core < std::min<size_t>(kMostCores, CPU_SETSIZE); ++core) {
            if (CPU_ISSET(core, &allowed)) add(core);
        }
        return cores;
    }
    const long count = std::clamp<long>(sysconf(_SC_NPROCESSORS_ONLN), 1, kMostCores);
    for (long core = 0; core < count; ++core) add(static_cast<size_t>(core));
    return cores;
}

int count_cores(const std::vector<CoreSet>& sets) {
    int count = 0;
    for (size_t i = 0; i < kMostCores / 64; ++i) {
        uint64_t any = 0;
        for (const CoreSet& set : sets) any |= set.words[i];
        count += __builtin_popcountll(any);
    }
    return count;
}

}  // namespace ddl
