// What a rank's collectives come to: counts, the time in which one is in flight, and who was late.
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/tally.h"
#include "world.h"

using namespace ddl;

TEST("calls that overlap count their time once") {
    Tally tally(2);
    Timing first, second;
    tally.begin(first, 10, 1000);
    tally.begin(second, 11, 500);
    tally.finish(1000, first, 13, -1);
    CHECK(tally.seconds() == 3);  // the second is still in flight, and the first one's time counts with the first
    tally.finish(500, second, 14, -1);
    CHECK(tally.seconds() == 4);
    CHECK(tally.calls() == 2 && tally.timed() == 2 && tally.bytes() == 1500 && tally.allreduces() == 1500);
    tally.finish(8, Timing{}, 0, -1);  // too small to be timed
    CHECK(tally.calls() == 3 && tally.timed() == 2 && tally.seconds() == 4);
}

TEST("a wait of over half of a call makes its rank late") {
    Tally tally(3);
    Timing call;
    tally.begin(call, 10, 1);
    call.heard = 16;
    tally.finish(1, call, 20, 2);
    tally.begin(call, 30, 1);
    call.heard = 34;
    tally.finish(1, call, 40, 2);
    CHECK(tally.waited() == (std::vector<double>{0, 0, 10}));
    CHECK(tally.late() == (std::vector<uint64_t>{0, 0, 1}));
}

TEST("calls that overlap wait for a rank together") {
    Tally tally(2);
    Timing first, second;
    tally.begin(first, 10, 1);
    tally.begin(second, 12, 1);
    first.heard = 15;
    second.heard = 16;
    tally.finish(1, first, 17, 1);
    tally.finish(1, second, 18, 1);
    CHECK(tally.waited() == (std::vector<double>{0, 6}));
    CHECK(tally.late() == (std::vector<uint64_t>{0, 2}));
}

TEST("calls that overlap wait for a rank together, if the later one finishes first, too") {
    Tally tally(2);
    Timing large, small;
    tally.begin(large, 10, 1);
    tally.begin(small, 12, 1);
    large.heard = small.heard = 15;
    tally.finish(1, small, 16, 1);
    tally.finish(1, large, 20, 1);
    CHECK(tally.waited() == (std::vector<double>{0, 5}));
}

TEST("after an error the calls that will not finish are in flight no more") {
    Tally tally(2);
    Timing lost, later;
    tally.begin(lost, 10, 1);
    tally.give_up(12);
    tally.begin(later, 20, 1);
    tally.finish(1, later, 21, -1);
    CHECK(tally.seconds() == 3);
}

TEST_WITH_SPINS("the rank behind a late one in the ring has waited for it, and no other has") {
    constexpr int kCalls = 3;
    World world(3, flat_plan(3), test_options(spins));
    world.run([](int rank, Engine& engine) {
        std::vector<float> data(64 << 10, 1);
        for (int i = 0; i < kCalls; ++i) {
            if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
            const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, data.size(), 0};
            CHECK(engine.run(kWorld, {task, data.data(), data.data()}).ok());
        }
        const Tally tally = engine.tally();
        CHECK(tally.calls() == kCalls && tally.timed() == kCalls);
        CHECK(tally.bytes() == kCalls * data.size() * sizeof(float));
        const double waited = tally.waited()[1];
        CHECK(rank == 2 ? waited > 0.1 && waited <= tally.seconds() : waited == 0);
    });
}
