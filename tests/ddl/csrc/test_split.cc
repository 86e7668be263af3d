#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "check.h"
#include "forecast/part.h"
#include "world.h"

using namespace ddl;

namespace {

// 4 hosts of 2 ranks, dealt in turn, in 2 racks behind slow uplinks.
Basis measured() {
    const Links links{{{{0, 2}, {1, 3}}, 25e6, {12.5e6, 12.5e6}, 1e-4, 2e-4, ""}, 2e9, 5e-6};
    return {parse_options(""), place({"a", "b", "c", "d", "a", "b", "c", "d"}), links};
}

thread_local Plan part;  // that this thread's rank made last

}  // namespace

TEST("communicators of some ranks have a plan of their own, and the same sums to the bit on all of theirs") {
    constexpr int kSize = 8;
    const Basis basis = measured();
    const Plan all = choose(basis.options, basis.placement, *basis.links);
    EngineOptions options = test_options();
    options.plan_part = [&](const Plan& world, const std::vector<int>& members) {
        return part = plan_of_part(basis, world, members);
    };
    World world(kSize, all, options);
    const std::vector<size_t> counts =
        check::kSanitized ? std::vector<size_t>{0, 513, 6000} : std::vector<size_t>{0, 1, 7, 513, 6000, 70001};
    const struct {
        const char* name;
        int (*color)(int rank);
        const char* plans;  // of color 0
    } splits[] = {{"all", [](int) { return 0; }, "r:2x2x2"},
                  {"a rank of each host", [](int rank) { return rank / 4; }, "r:2x2"},
                  {"racks", [](int rank) { return rank % 2; }, "r:2x2"},
                  {"hosts", [](int rank) { return rank % 4; }, "r:2"},
                  {"uneven hosts", [](int rank) { return rank < 5 ? 0 : 1; }, "r:5"},
                  {"some", [](int rank) { return rank % 3 == 0 ? -1 : 0; }, "r:5"}};
    for (const auto& split : splits) {
        for (const int turn : {1, -1}) {  // of the order of their numbers
            for (const size_t count : counts) {
                std::vector<std::vector<float>> inputs(kSize), outputs(kSize);
                for (int rank = 0; rank < kSize; ++rank) {
                    std::mt19937_64 random(check::seed() + static_cast<uint64_t>(rank));
                    std::normal_distribution<float> normal;
                    for (size_t i = 0; i < count; ++i) inputs[static_cast<size_t>(rank)].push_back(normal(random));
                }
                world.run([&](int rank, Engine& engine) {
                    const auto me = static_cast<size_t>(rank);
                    CommId comm = 0;
                    CHECK_EQ(engine.split(kWorld, split.color(rank), turn * rank, &comm).message, std::string());
                    if (split.color(rank) < 0) return;
                    if (split.color(rank) == 0) CHECK_EQ(format_mode(part), std::string(split.plans));
                    outputs[me].resize(count);
                    const Call call{
                        {Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0}, inputs[me].data(), outputs[me].data()};
                    CHECK_EQ(engine.run(comm, call).message, std::string());
                    CHECK(engine.free(comm).ok());
                });
                std::map<int, std::vector<size_t>> members;
                for (int rank = 0; rank < kSize; ++rank) {
                    if (split.color(rank) >= 0) members[split.color(rank)].push_back(static_cast<size_t>(rank));
                }
                for (const auto& [color, ranks] : members) {
                    for (const size_t rank : ranks) {
                        CHECK(count == 0 ||
                              std::memcmp(outputs[rank].data(), outputs[ranks[0]].data(), count * sizeof(float)) == 0);
                    }
                    for (size_t i = 0; i < count; ++i) {
                        double sum = 0, size = 0;
                        for (const size_t rank : ranks) {
                            sum += static_cast<double>(inputs[rank][i]);
                            size += std::fabs(static_cast<double>(inputs[rank][i]));
                        }
                        if (std::fabs(static_cast<double>(outputs[ranks[0]][i]) - sum) <= 1e-6 * size) continue;
                        CHECK_EQ(std::string(split.name) + ": element " + std::to_string(i), std::string("the sum"));
                        break;
                    }
                }
            }
        }
    }
}

TEST("a group that its members make alone is planned as a part is") {
    const Basis basis = measured();
    EngineOptions options = test_options();
    options.plan_part = [&](const Plan& world, const std::vector<int>& members) {
        return part = plan_of_part(basis, world, members);
    };
    World world(8, choose(basis.options, basis.placement, *basis.links), options);
    world.run([&](int rank, Engine& engine) {
        if (rank >= 4) return;
        CommId comm = 0;
        CHECK_EQ(engine.create_group({3, 2, 1, 0}, 7, &comm).message, std::string());
        CHECK_EQ(format_mode(part), std::string("r:2x2"));
        CHECK(part.ranks == std::vector<int>({3, 1, 2, 0}));
        CHECK_CONTAINS(part.reason, "2 racks: ");
    });
}

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
