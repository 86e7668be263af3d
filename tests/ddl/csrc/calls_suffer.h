// Blocking calls, which begin and go on under one hold of the lock, while memory runs out.
#pragma once

#include <atomic>
#include <new>
#include <string>
#include <vector>

#include "allocation.h"
#include "check.h"
#include "world.h"

// The two ranks of `world` reduce `count` elements while allocations fail, after so many that do not. True if one
// failed.
inline bool calls_suffer(World& world, size_t count, int64_t after, int64_t failures) {
    std::vector<float> data[2] = {std::vector<float>(count, 1), std::vector<float>(count, 2)};
    ddl::Status ends[2];
    std::atomic<int> here{0};
    std::atomic<bool> failed{false}, refused{false};
    world.run([&](int rank, ddl::Engine& engine) {
        const auto me = static_cast<size_t>(rank);
        float* const mine = data[rank].data();
        ++here;
        while (here < 2) std::this_thread::yield();
        if (rank == 0) fail_allocations(after, failures);
        try {
            ends[me] =
                engine.run(ddl::kWorld, {{ddl::Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0}, mine, mine});
        } catch (const std::bad_alloc&) {
            ends[me].code = DDL_ERROR_MEMORY;  // and no memory for its words
        }
        if (ends[me].message != "out of memory") return;
        // It was not let in, and is not waited for. Its goodbye is not lost.
        refused = true;
        if (stop_failing()) failed = true;
        engine.shutdown();
    });
    if (stop_failing()) failed = true;
    for (size_t rank = 0; rank < 2; ++rank) {
        if (ends[rank].ok()) {
            CHECK(data[rank] == std::vector<float>(count, 3));
        } else if (!refused || ends[rank].code != DDL_ERROR_SHUTDOWN) {
            CHECK_EQ(ends[rank].code, DDL_ERROR_MEMORY);
        }
    }
    return failed;
}
