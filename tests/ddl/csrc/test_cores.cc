#include <sched.h>

#include <thread>

#include "base/cores.h"
#include "check.h"

using namespace ddl;

TEST("the processors of a host are those that any of its ranks may run on") {
    CoreSet one, other;
    one.words[0] = 0b0011;
    other.words[0] = 0b0110;
    other.words[kMostCores / 64 - 1] = uint64_t{1} << 63;
    CHECK_EQ(count_cores({}), 0);
    CHECK_EQ(count_cores({one, one}), 2);
    CHECK_EQ(count_cores({one, other}), 4);
}

TEST("a thread that is bound to one processor may run on one") {
    CHECK(count_cores({own_cores()}) >= 1);
    std::thread bound([] {
        cpu_set_t allowed, first;
        CPU_ZERO(&first);
        CHECK_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
        for (size_t core = 0; core < CPU_SETSIZE && CPU_COUNT(&first) == 0; ++core) {
            if (CPU_ISSET(core, &allowed)) CPU_SET(core, &first);
        }
        CHECK_EQ(sched_setaffinity(0, sizeof first, &first), 0);
        CHECK_EQ(count_cores({own_cores()}), 1);
    });
    bound.join();
}
