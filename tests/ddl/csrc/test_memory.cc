// Out of memory: allocations fail one after the other, and no request is lost.
#include <atomic>

#include "allocation.h"
#include "backoff.h"
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

// A message goes from one rank to another while allocations fail; true where one did.
bool message_suffers(size_t count, int64_t after, int64_t failures) {
    EngineOptions options = test_options();
    options.patience = {0.01, 0.1, 1};  // who was not told of an error notices
    World world(2, flat_plan(2), options);
    const std::vector<uint8_t> sent(count, 7);
    std::vector<uint8_t> got(count, 0);
    RequestPtr requests[2];
    bool begun[2] = {false, false};
    fail_allocations(after, failures);
    for (size_t rank = 0; rank < 2; ++rank) {
        try {
            Mail mail;
            mail.count = count;
            mail.from = sent.data();
            mail.to = got.data();
            mail.incoming = rank == 1;
            begun[rank] = world.engines[rank]->post(kWorld, rank == 0 ? 1 : 0, std::move(mail), &requests[rank]).ok();
        } catch (const std::bad_alloc&) {
            CHECK(!requests[rank]);
        }
    }
    const bool all_begun = begun[0] && begun[1];
    bool failed = !all_begun && stop_failing();
    for (size_t rank = 0; rank < 2; ++rank) {
        if (!begun[rank]) world.engines[rank]->shutdown();
    }
    for (size_t rank = 0; rank < 2; ++rank) {
        if (begun[rank]) world.engines[rank]->wait(requests[rank]);
    }
    failed |= stop_failing();
    if (begun[1] && requests[1]->status().ok()) CHECK(got == sent);
    if (!failed) CHECK(all_begun && requests[0]->status().ok() && requests[1]->status().ok());
    return failed;
}

// Three ranks make a communicator while an allocation fails; true where one did.
bool group_suffers(int64_t after) {
    EngineOptions options = test_options();
    options.patience = {0.01, 5, 10};  // who was not told of an error asks
    World world(3, flat_plan(3), options);
    const double begin = seconds_now();
    const std::vector<int> everyone{0, 1, 2};
    std::atomic<int> here{0};
    world.run([&](int rank, Engine& engine) {
        CommId comm = 0;
        ++here;
        while (here < 3) std::this_thread::yield();
        if (rank == 0) fail_allocations(after, 1);
        const Status status = engine.create_group(everyone, 0, &comm);
        CHECK(status.ok() || status.code == DDL_ERROR_MEMORY || status.code == DDL_ERROR_SHUTDOWN);
        CHECK_EQ(engine.free_communicators(), kMostCommunicators - (status.ok() ? 2 : 1));
        // Before it has said anything, a rank may try again: nobody is told.
        if (status.code == DDL_ERROR_MEMORY) engine.shutdown();
    });
    CHECK(seconds_now() - begin < 5);
    return stop_failing();
}

}  // namespace

TEST("whichever allocation fails, a message ends, and is never half received") {
    for (const size_t count : {100, 200000}) {
        for (const int64_t failures : {1, 5}) {
            int64_t after = 0;
            while (after < 200 && message_suffers(count, after, failures)) after += check::kSanitized ? 4 : 1;
            CHECK(after > 10);
        }
    }
}

TEST("whichever allocation fails, the making of a group ends on every rank at once, and keeps no number for it") {
    int64_t after = 0;
    while (after < 200 && group_suffers(after)) after += check::kSanitized ? 4 : 1;
    CHECK(after > 10);
}

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
