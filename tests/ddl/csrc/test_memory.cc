// Out of memory: allocations fail one after the other, and no request is lost.
#include "allocation.h"
#include "check.h"
#include "world.h"

using namespace ddl;

namespace {

// Two ranks reduce `count` elements while allocations fail; true where one did.
bool suffers(size_t count, int64_t after, int64_t failures) {
    EngineOptions options = test_options();
    options.patience = {0.01, 60, 100};  // who was not told of an error asks
    World world(2, flat_plan(2), options);
    std::vector<float> data[2] = {std::vector<float>(count, 1), std::vector<float>(count, 2)};
    RequestPtr requests[2];
    Status begun[2];
    fail_allocations(after, failures);
    for (size_t rank = 0; rank < 2; ++rank) {
        float* const buffer = data[rank].data();
        begun[rank] = world.engines[rank]->submit(
            kWorld, {{Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0}, buffer, buffer}, &requests[rank]);
    }
    // Who was not let in is not waited for. (Its goodbye may be lost like any notice, and then only the timeout is
    // left.)
    const bool all_let_in = begun[0].ok() && begun[1].ok();
    bool failed = !all_let_in && stop_failing();
    for (size_t rank = 0; rank < 2; ++rank) {
        if (begun[rank].ok()) continue;
        CHECK_EQ(begun[rank].code, DDL_ERROR_MEMORY);
        world.engines[rank]->shutdown();
    }
    for (size_t rank = 0; rank < 2; ++rank) {
        if (requests[rank]) world.engines[rank]->wait(requests[rank]);
    }
    failed |= stop_failing();
    for (size_t rank = 0; rank < 2; ++rank) {
        if (!requests[rank]) continue;
        const Status& status = requests[rank]->status();
        if (status.ok()) {
            CHECK(data[rank] == std::vector<float>(count, 3));
        } else if (all_let_in) {
            CHECK_EQ(status.code, DDL_ERROR_MEMORY);
            CHECK_CONTAINS(status.message, "out of memory");
        }
    }
    return failed;
}

}  // namespace

TEST("whichever allocation fails, every request that was accepted ends, right or with an error") {
    for (const size_t count : {100, 200000}) {
        for (const int64_t failures : {1, 3, 40}) {
            int64_t after = 0;
            // Each of the first ones, which make what is made once; of the many alike behind them some.
            while (after < 4000 && suffers(count, after, failures)) after += 1 + after / (check::kSanitized ? 4 : 10);
            CHECK(after > 20);
        }
    }
}
