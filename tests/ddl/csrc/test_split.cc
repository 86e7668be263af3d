#include <atomic>

#include "check.h"
#include "world.h"

using namespace ddl;

TEST("threads that split communicators at once get different ones, also where few numbers are left") {
    EngineOptions options = test_options();
    for (const int taken : {1, check::kSanitized ? 50 : 1014}) {
        World world(2, flat_plan(2), options);
        std::vector<CommId> parents(2);
        world.run([&](int rank, Engine& engine) {
            CommId comm = 0;
            for (int i = 0; i < taken; ++i) {
                CHECK_EQ(engine.split(kWorld, 0, 0, &comm).message, std::string());
                if (i == 0) parents[static_cast<size_t>(rank)] = comm;
            }
        });
        for (int rank = 0; rank < 2; ++rank) world.network.delay(rank, 0.001);  // all look before any has taken
        for (int repeat = 0; repeat < 10; ++repeat) {
            CommId made[2][2] = {};
            world.run([&](int rank, Engine& engine) {
                std::thread other([&] { CHECK(engine.split(parents[0], 0, 0, &made[rank][1]).ok()); });
                CHECK(engine.split(kWorld, 0, 0, &made[rank][0]).ok());
                other.join();
            });
            CHECK(made[0][0] != made[0][1]);
            CHECK_EQ(made[0][0], made[1][0]);
            CHECK_EQ(made[0][1], made[1][1]);
            world.run([&](int rank, Engine& engine) {
                for (const CommId comm : made[rank]) CHECK(engine.free(comm).ok());
            });
        }
    }
}

TEST("of two threads that free one communicator, one is told that it is gone") {
    World world(1, flat_plan(1));
    Engine& engine = *world.engines[0];
    for (int i = 0; i < 300; ++i) {
        CommId comm = 0;
        CHECK(engine.split(kWorld, 0, 0, &comm).ok());
        std::atomic<int> ready{0}, freed{0};
        const auto free = [&] {
            for (++ready; ready < 2;) {
            }
            freed += engine.free(comm).ok();
        };
        std::thread other(free);
        free();
        other.join();
        CHECK_EQ(freed.load(), 1);
    }
}
