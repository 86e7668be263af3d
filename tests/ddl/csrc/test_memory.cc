// Out of memory: allocations fail one after the other, and no request is lost.
#include <atomic>

#include "allocation.h"
#include "base/backoff.h"
#include "calls_suffer.h"
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

// A message goes from one rank to another while allocations fail; true if one did. A rank that was not told of an error
// gives up after `timeout` seconds.
bool message_suffers(size_t count, int64_t after, int64_t failures, double timeout) {
    EngineOptions options = test_options();
    options.patience = {0.01, timeout, timeout};
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
    if (!failed && timeout >= 60) CHECK(all_begun && requests[0]->status().ok() && requests[1]->status().ok());
    return failed;
}

bool ended_by_memory(const Status& status) {
    return status.code == DDL_ERROR_MEMORY || status.code == DDL_ERROR_SHUTDOWN;  // a rank's that shut down for it
}

// Who has a communicator uses it: nobody waits there for one that could not make it.
void meet(Engine& engine, CommId comm) {
    try {
        const Status status = engine.run(comm, {{Collective::barrier, DDL_UINT8, DDL_SUM, 0, 0}, nullptr, nullptr});
        CHECK(status.ok() || ended_by_memory(status));
        if (status.message != "out of memory") return;
        engine.shutdown();  // it was not let in, and nobody waits for it
    } catch (const std::bad_alloc&) {
        // No memory for the words of its error.
    }
}

// Three ranks split their communicator, two of them into one, while an allocation fails; true where one did. `agreed`:
// one that comes when a rank knows the others to agree.
bool split_suffers(int64_t after, int spins, bool agreed) {
    EngineOptions options = test_options(spins);
    options.patience = {0.01, 5, 10};  // who was not told of an error asks
    std::atomic<bool> first{true};
    options.plan_part = [&](const Plan& all, const std::vector<int>& members) {
        if (agreed && first.exchange(false)) fail_allocations(after, 1);
        return plan_of_part(all, members);
    };
    World world(3, flat_plan(3), options);
    const double begin = seconds_now();
    std::atomic<int> here{0};
    world.run([&](int rank, Engine& engine) {
        CommId comm = 0;
        ++here;
        while (here < 3) std::this_thread::yield();
        if (rank == 0 && !agreed) fail_allocations(after, 1);
        const Status status = engine.split(kWorld, rank == 1 ? -1 : 0, -rank, &comm);
        CHECK(status.ok() || status.code == DDL_ERROR_MEMORY);
        const bool has_one = status.ok() && rank != 1;
        if (has_one) meet(engine, comm);
    });
    CHECK(seconds_now() - begin < 5);
    return stop_failing();
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
        CHECK(status.ok() || ended_by_memory(status));
        // Before it has said anything, a rank may try again: nobody is told.
        if (status.code == DDL_ERROR_MEMORY) return engine.shutdown();
        if (status.ok()) meet(engine, comm);
    });
    CHECK(seconds_now() - begin < 5);
    return stop_failing();
}

}  // namespace

TEST("whichever allocation fails, a message ends, and is never half received") {
    for (const size_t count : {100, 200000}) {
        for (const int64_t failures : {1, 5}) {
            int64_t after = 0;
            while (after < 200 && message_suffers(count, after, failures, 0.05)) after += check::kSanitized ? 4 : 1;
            CHECK(after > 10);
            message_suffers(count, INT32_MAX, failures, 60);  // with memory and time it arrives
        }
    }
}

TEST("whichever allocation fails, the making of a group ends on every rank at once") {
    int64_t after = 0;
    while (after < 200 && group_suffers(after)) after += check::kSanitized ? 4 : 1;
    CHECK(after > 10);
}

TEST("whichever allocation fails, a split that does not come to be keeps no number") {
    bool suffered = true;
    for (int64_t after = 0; suffered; after += check::kSanitized ? 4 : 1) {
        World world(1, flat_plan(1));
        Engine& engine = *world.engines[0];
        CommId whole = kWorld, comm = kWorld;
        CHECK(engine.split(kWorld, 0, 0, &whole).ok());
        fail_allocations(after, 1);
        uint32_t made = engine.split(kWorld, 0, 0, &comm).ok() ? 3 : 2;
        suffered = stop_failing();
        while (engine.split(whole, 0, 0, &comm).ok()) ++made;
        CHECK_EQ(made, kMostCommunicators);
    }
}

TEST_WITH_SPINS(
    "whichever allocation fails, a split ends on every rank at once, and so does what is called on the part") {
    for (const bool agreed : {true, false}) {
        int64_t after = 0;
        while (after < 3000 && split_suffers(after, spins, agreed)) after += agreed ? 1 : 1 + after / 20;
        CHECK(after > 20);
    }
}

TEST("whichever allocation fails, blocking calls end, right or with an error") {
    for (const size_t count : {100, 20000}) {
        for (const int64_t failures : {1, 3}) {
            const auto suffers = [&](int64_t after) {
                EngineOptions options = test_options(50);
                options.patience = {0.01, 60, 100};  // who was not told of an error asks
                World world(2, flat_plan(2), options);
                return calls_suffer(world, count, after, failures);
            };
            int64_t after = 0;
            while (after < 2000 && suffers(after)) after += 1 + after / (check::kSanitized ? 4 : 10);
            CHECK(after > 10);
        }
    }
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
