// Ranks that make different calls when no data passes between them, and messages of earlier calls still in flight.
#include <chrono>

#include "base/backoff.h"
#include "check.h"
#include "engine/notice.h"
#include "world.h"

using namespace ddl;

namespace {

// Asks soon; long before the timeout each of these faults is known.
EngineOptions asking() {
    EngineOptions options = test_options();
    options.patience = {0.1, 60, 60};
    return options;
}

Call allreduce(std::vector<float>& data) {
    return {{Collective::allreduce, DDL_FLOAT32, DDL_SUM, data.size(), 0}, data.data(), data.data()};
}

Call broadcast(std::vector<float>& data, int root) {
    return {{Collective::broadcast, DDL_FLOAT32, DDL_SUM, data.size(), root}, nullptr, data.data()};
}

}  // namespace

TEST("broadcasts with different roots are found by the next call at the latest, on every rank") {
    for (const int size : {2, 4}) {
        World world(size, flat_plan(size), asking());
        world.run([&](int rank, Engine& engine) {
            std::vector<float> data(10, 1), next(10, 1);
            engine.run(kWorld, broadcast(data, rank == 0 ? 0 : 1));
            const Status status = engine.run(kWorld, allreduce(next));
            CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
            CHECK_CONTAINS(status.message, "rank 0");
            if (size == 2) CHECK(next == std::vector<float>(10, 1));  // of more, some agree with one another
        });
    }
}

TEST("an empty call on one rank is found by the next call") {
    World world(2, flat_plan(2), asking());
    world.run([](int rank, Engine& engine) {
        std::vector<float> data(rank == 0 ? 0 : 10, 1), next(10, 1);
        // The root's broadcast ends without hearing from anybody, and so does an empty one.
        CHECK(engine.run(kWorld, broadcast(data, 1)).ok());
        const Status status = engine.run(kWorld, allreduce(next));
        CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
        CHECK_CONTAINS(status.message, "their calls on this communicator before it differ");
    });
}

TEST("a message of a freed communicator is not taken for data of another with its number") {
    World world(2, flat_plan(2), asking());
    world.run([](int rank, Engine& engine) {
        CommId first = 0, second = 0;
        CHECK(engine.split(kWorld, 0, 0, &first).ok());
        std::vector<float> data(10, 111);
        CHECK(engine.run(first, broadcast(data, rank)).ok());  // each is the root: its data is never taken
        for (int i = 0; i < 5000 && second != first; ++i) {
            CHECK(engine.free(i == 0 ? first : second).ok());
            CHECK(engine.split(kWorld, 0, 0, &second).ok());
        }
        CHECK_EQ(second, first);
        std::vector<float> next(10, rank == 0 ? 5.0f : -1.0f);
        engine.run(second, broadcast(next, 0));
        CHECK_EQ(next[0], rank == 0 ? 5.0f : -1.0f);
        const Status status = engine.run(second, allreduce(next));
        CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
        CHECK_CONTAINS(status.message, "is of an earlier communicator of this number");
    });
}

TEST("a rank that finalizes after a call that did not match is a mismatch, not a timeout") {
    World world(2, flat_plan(2), asking());
    world.run([](int rank, Engine& engine) {
        std::vector<float> data(rank == 0 ? 0 : 5);
        const Status status = engine.run(kWorld, allreduce(data));
        if (rank == 0) return engine.shutdown();
        CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
        CHECK_CONTAINS(status.message, "but rank 0 called allreduce #0 of communicator 0 (float32, sum, 0 elements)");
    });
}

TEST("a rank that finalizes is named as soon as it says so, and not only when it is asked") {
    EngineOptions options = test_options();
    options.patience = {20, 60, 60};  // its first question comes too late
    World world(2, flat_plan(2), options);
    double left = 0, told = 0;
    world.run([&](int rank, Engine& engine) {
        std::vector<float> data(10);
        if (rank == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the other waits
            left = seconds_now();
            return engine.shutdown();
        }
        CHECK_CONTAINS(engine.run(kWorld, allreduce(data)).message, "rank 1 has finalized without calling it");
        told = seconds_now();
    });
    CHECK(told - left < 10);
}

TEST("an abort counts only from a member, and only for the communicator of that time") {
    World world(3, flat_plan(3), asking());
    NoticeContent abort;
    abort.kind = NoticeKind::abort;
    abort.code = DDL_ERROR_INTERNAL;
    abort.text = "forged";
    std::vector<CommId> pair(3);
    world.run([&](int rank, Engine& engine) { CHECK(engine.split(kWorld, rank == 0 ? -1 : 0, 0, &pair[rank]).ok()); });
    abort.comm = pair[1];
    abort.birth = birth_of_child({kWorld, 0}, 0);
    const auto pass = [&](int from) {
        const auto transport = world.network.transport(from);
        send_notice(*transport, {from == 1 ? 2 : 1}, abort);
        send_notice(*transport, {from == 0 ? 2 : 0}, abort);
    };
    const auto calls = [&](bool good) {
        world.run([&](int rank, Engine& engine) {
            std::vector<float> data(10);
            if (rank == 0) return;
            bool ok = true;
            for (int i = 0; i < 30; ++i) {  // notices are taken between them
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                ok = ok && engine.run(pair[1], allreduce(data)).ok();
            }
            CHECK_EQ(ok, good);
        });
    };
    pass(0);  // no member
    calls(true);
    ++abort.birth;
    pass(1);  // of another time
    calls(true);
    --abort.birth;
    pass(1);
    calls(false);
}

TEST("a rank that an abort did not reach learns of it by asking") {
    World world(3, flat_plan(3), asking());
    world.network.cut(1, 2);
    world.run([](int rank, Engine& engine) {
        std::vector<float> data(rank == 1 ? 11 : 10);
        CHECK_EQ(engine.run(kWorld, allreduce(data)).code, DDL_ERROR_MISMATCH);
    });
}

TEST("a rank that called and then freed the communicator is not named as missing") {
    EngineOptions options = asking();
    options.patience.timeout_seconds = 2;
    World world(4, flat_plan(4), options);
    world.run([](int rank, Engine& engine) {
        CommId comm = 0;
        CHECK(engine.split(kWorld, 0, 0, &comm).ok());
        std::vector<float> data(10, 1);
        if (rank == 2) return;
        const Status status = engine.run(comm, broadcast(data, 0));
        if (rank != 3) {
            CHECK(status.ok());
            CHECK(engine.free(comm).ok());
            return;
        }
        CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
        CHECK_CONTAINS(status.message, ": rank 2 has not called it");
        CHECK(!check::contains(status.message, "rank 0"));
        CHECK(!check::contains(status.message, "rank 1"));
    });
}

TEST("calls whose first messages are in different chunks are a mismatch, not a broken link") {
    for (int repeat = 0; repeat < 6; ++repeat) {
        World world(4, make_plan(4, {2, 2}, "r"), asking());
        world.run([](int rank, Engine& engine) {
            std::vector<float> data(1000000, 1), out(1000000);
            const Call alltoall{{Collective::alltoall, DDL_FLOAT32, DDL_SUM, 250000, 0}, data.data(), out.data()};
            const Status status = engine.run(kWorld, rank == 2 ? alltoall : allreduce(data));
            CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
            CHECK_CONTAINS(status.message, "rank 2 called alltoall #0 of communicator 0 (float32, 250000 elements)");
        });
    }
}

TEST("a split is called so in a message") {
    World world(2, flat_plan(2), asking());
    world.run([](int rank, Engine& engine) {
        std::vector<float> data(10);
        CommId comm = 0;
        const Status status = rank == 0 ? engine.split(kWorld, 0, 0, &comm) : engine.run(kWorld, allreduce(data));
        CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
        CHECK_CONTAINS(status.message, "rank 0 called split #0 of communicator 0");
    });
}

TEST("messages do not show the library's own calls as the program's") {
    const Task task{Collective::allgather, DDL_UINT8, DDL_SUM, 2048, 0};
    CHECK_EQ(describe(make_header(task, {}, 3, 0)),
             std::string("allgather #3 of communicator 0 (uint8, 2048 elements)"));
    CHECK_EQ(describe(make_header(task, {}, 3, 0, 0, Purpose::split)), std::string("split #3 of communicator 0"));
    CHECK_EQ(describe(make_header(task, {}, 3, 0, 0, Purpose::init)),
             std::string("ddl_init's own call #3 of communicator 0"));
    CHECK(!same_call(make_header(task, {}, 3, 0), make_header(task, {}, 3, 0, 0, Purpose::init)));
}
