// Engines whose ranks share memory with those of their host: what test_engine.cc, test_messages.cc, test_faults.cc and
// test_memory.cc check over the in-process network, where it may differ.
#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "allocation.h"
#include "calls_suffer.h"
#include "check.h"
#include "world.h"

using namespace ddl;

namespace {

// Hosts of ranks: one, two that are even, and several that are not.
const std::vector<std::vector<int>> kPlacements = {
    {0, 0}, {0, 0, 0}, {0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 2, 1, 0, 0, 3}};
constexpr size_t kSmallPipe = 1024;  // which few messages fit into

Call allreduce(std::vector<int32_t>& data) {
    return {{Collective::allreduce, DDL_INT32, DDL_SUM, data.size(), 0}, data.data(), data.data()};
}

// The input of `rank` to call number `call`; the sum over ranks is known.
std::vector<int32_t> numbers(size_t count, int rank, int call) {
    std::vector<int32_t> made(count);
    for (size_t i = 0; i < count; ++i) made[i] = static_cast<int32_t>(i % 1000) * (rank + 1) + call;
    return made;
}

std::vector<int32_t> sum(size_t count, int size, int call) {
    std::vector<int32_t> made(count);
    for (int rank = 0; rank < size; ++rank) {
        const auto its = numbers(count, rank, call);
        for (size_t i = 0; i < count; ++i) made[i] += its[i];
    }
    return made;
}

std::vector<Status> results(World& world, const std::function<Status(int, Engine&)>& body) {
    std::vector<Status> found(world.engines.size());
    world.run([&](int rank, Engine& engine) { found[static_cast<size_t>(rank)] = body(rank, engine); });
    return found;
}

EngineOptions impatient(double timeout, int spins) {
    EngineOptions options = test_options(spins);
    options.patience = {timeout / 10, timeout / 3, timeout};
    return options;
}

}  // namespace

TEST_WITH_SPINS("over shared memory: allreduces of all lengths, one by one and several in flight") {
    for (const auto& host_of : kPlacements) {
        for (const size_t pipe_bytes : {size_t{0}, kSmallPipe}) {
            const int size = static_cast<int>(host_of.size());
            World world(host_of, flat_plan(size), test_options(spins), pipe_bytes);
            world.run([&](int rank, Engine& engine) {
                const std::vector<size_t> counts = {0, 1, 10, 61, 1000, 4096, 4097, 5200, 20'000, 100'000};
                std::vector<std::vector<int32_t>> data;
                std::vector<RequestPtr> requests(counts.size());
                for (size_t i = 0; i < counts.size(); ++i) {
                    auto one = numbers(counts[i], rank, static_cast<int>(i));
                    CHECK_EQ(engine.run(kWorld, allreduce(one)).message, std::string());
                    CHECK(one == sum(counts[i], size, static_cast<int>(i)));
                    data.push_back(numbers(counts[i], rank, 7));
                }
                for (size_t i = 0; i < counts.size(); ++i) {
                    CHECK(engine.submit(kWorld, allreduce(data[i]), &requests[i]).ok());
                }
                for (size_t i = counts.size(); i-- > 0;) {
                    CHECK_EQ(engine.wait(requests[i]).message, std::string());
                    CHECK(data[i] == sum(counts[i], size, 7));
                }
                CHECK(engine.run(kWorld, {{Collective::barrier, DDL_UINT8, DDL_SUM, 0, 0}, nullptr, nullptr}).ok());
            });
            for (auto& engine : world.engines) engine->shutdown();
            CHECK_EQ(world.network.pending(), size_t{0});
        }
    }
}

// Most calls are like the one before: these take the fast path.
TEST_WITH_SPINS(
    "over shared memory: small calls again and again, with late ranks and other calls and messages between") {
    constexpr int kCalls = 300;
    for (const auto& host_of : kPlacements) {
        for (const size_t pipe_bytes : {size_t{0}, kSmallPipe}) {
            const int size = static_cast<int>(host_of.size());
            // With halvings messages of one direction follow each other, which the fast path does not take.
            const bool is_halved = size == 4 && pipe_bytes == 0;
            Plan plan = flat_plan(size);
            if (is_halved) {
                plan.small_bytes = 1 << 20;
                plan.halved_above = {0, 0};
            }
            World world(host_of, plan, test_options(spins), pipe_bytes);
            world.run([&](int rank, Engine& engine) {
                std::mt19937 common(static_cast<unsigned>(check::seed()));  // gives every rank the same
                std::mt19937 own(static_cast<unsigned>(check::seed()) + static_cast<unsigned>(rank));
                Task task;
                uint64_t calls = 0, bytes = 0;
                const auto among = [](std::mt19937& from, unsigned choices) {
                    return static_cast<int>(from() % choices);
                };
                for (int call = 0; call < kCalls; ++call) {
                    if (call == 0 || among(common, 6) == 0) {
                        const Collective kinds[] = {Collective::allreduce,      Collective::allreduce,
                                                    Collective::allreduce,      Collective::broadcast,
                                                    Collective::reduce_scatter, Collective::allgather,
                                                    Collective::alltoall,       Collective::barrier};
                        const size_t counts[] = {0, 1, 3, 30, 300, 1000};
                        const ReduceOp ops[] = {DDL_SUM, DDL_MAX, DDL_AVERAGE};
                        task = {kinds[among(common, 8)], DDL_INT32, ops[among(common, 3)], counts[among(common, 6)],
                                among(common, static_cast<unsigned>(size))};
                        if (task.collective == Collective::barrier) task.count = 0;
                    }
                    const bool in_place = among(common, 2) == 0;
                    const int beside = among(common, 10);  // 0: an allreduce, 1: a message from rank 0 to rank 1
                    if (among(own, 10) == 0) std::this_thread::sleep_for(std::chrono::microseconds(among(own, 100)));

                    const size_t count = task.count, ranks = static_cast<size_t>(size), me = static_cast<size_t>(rank);
                    const Extent extent = extent_of(task, size);
                    auto input = numbers(extent.input / 4, rank, call);
                    std::vector<int32_t> output(extent.output / 4, -1), expected(extent.output / 4);
                    for (size_t i = 0; i < expected.size(); ++i) {
                        const auto of = [&](size_t its, size_t at) {
                            return static_cast<int32_t>(at % 1000) * static_cast<int32_t>(its + 1) + call;
                        };
                        const auto reduced = [&](size_t at) {
                            int32_t result = of(0, at);
                            for (size_t its = 1; its < ranks; ++its) {
                                result = task.op == DDL_MAX ? std::max(result, of(its, at)) : result + of(its, at);
                            }
                            return task.op == DDL_AVERAGE ? result / size : result;
                        };
                        switch (task.collective) {
                            case Collective::allreduce: expected[i] = reduced(i); break;
                            case Collective::reduce_scatter: expected[i] = reduced(me * count + i); break;
                            case Collective::broadcast: expected[i] = of(static_cast<size_t>(task.root), i); break;
                            case Collective::allgather: expected[i] = of(i / count, i % count); break;
                            case Collective::alltoall: expected[i] = of(i / count, me * count + i % count); break;
                            case Collective::barrier: break;
                        }
                    }
                    if (task.collective == Collective::broadcast) output = input;
                    calls += beside == 0 ? 2 : 1;
                    bytes += std::max(extent.input, extent.output) + (beside == 0 ? 50 * sizeof(int32_t) : 0);
                    RequestPtr other;
                    auto others = numbers(50, rank, call);
                    Mail mail;
                    mail.tag = call;
                    mail.type = DDL_INT32;
                    mail.count = others.size();
                    mail.incoming = rank == 1;
                    mail.from = mail.to = others.data();
                    if (beside == 0) CHECK(engine.submit(kWorld, allreduce(others), &other).ok());
                    if (beside == 1 && rank < 2) CHECK(engine.post(kWorld, 1 - rank, mail, &other).ok());
                    auto& target = in_place && task.collective == Collective::allreduce ? input : output;
                    CHECK_EQ(engine.run(kWorld, {task, input.data(), target.data()}).message, std::string());
                    if (task.collective != Collective::barrier) CHECK(target == expected);
                    if (other) CHECK_EQ(engine.wait(other).message, std::string());
                    if (beside == 0) CHECK(others == sum(50, size, call));
                    if (beside == 1 && rank < 2) CHECK(others == numbers(50, 0, call));
                }
                CHECK_EQ(engine.tally().calls(), calls);
                CHECK_EQ(engine.tally().bytes(), bytes);
            });
            for (auto& engine : world.engines) engine->shutdown();
            CHECK_EQ(world.network.pending(), size_t{0});
        }
    }
}

TEST_WITH_SPINS("over shared memory: a root that is many broadcasts ahead of a late rank") {
    for (const size_t pipe_bytes : {size_t{0}, kSmallPipe}) {
        World world({0, 0, 0}, flat_plan(3), test_options(spins), pipe_bytes);
        world.run([&](int rank, Engine& engine) {
            if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            for (int call = 0; call < 100; ++call) {
                auto data = numbers(30, rank, call);
                CHECK(engine.run(kWorld, {{Collective::broadcast, DDL_INT32, DDL_SUM, 30, 0}, nullptr, data.data()})
                          .ok());
                CHECK(data == numbers(30, 0, call));
            }
        });
    }
}

TEST("over shared memory: messages between two ranks, more than a pipe has room for, in any order of tags") {
    for (const size_t pipe_bytes : {size_t{0}, kSmallPipe}) {
        World world({0, 0}, flat_plan(2), test_options(), pipe_bytes);
        world.run([&](int rank, Engine& engine) {
            constexpr int kMessages = 60;
            const auto count = [](int i) { return static_cast<size_t>(i % 3 == 0 ? 9000 : i % 50); };
            std::vector<std::vector<int32_t>> data;
            std::vector<RequestPtr> requests(kMessages);
            for (int i = 0; i < kMessages; ++i) {
                data.push_back(rank == 0 ? numbers(count(i), 0, i) : std::vector<int32_t>(count(i)));
            }
            for (int i = 0; i < kMessages; ++i) {
                const int mine = rank == 0 ? i : kMessages - 1 - i;
                auto& its = data[static_cast<size_t>(mine)];
                Mail mail;
                mail.tag = mine;
                mail.type = DDL_INT32;
                mail.count = its.size();
                mail.incoming = rank == 1;
                mail.from = its.data();
                mail.to = its.data();
                CHECK(engine.post(kWorld, 1 - rank, mail, &requests[static_cast<size_t>(mine)]).ok());
            }
            for (int i = 0; i < kMessages; ++i) {
                CHECK_EQ(engine.wait(requests[static_cast<size_t>(i)]).message, std::string());
                CHECK(data[static_cast<size_t>(i)] == numbers(count(i), 0, i));
            }
        });
    }
}

TEST_WITH_SPINS("over shared memory: a mismatch names both calls, and writes nothing") {
    for (const size_t count : {10, 4000, 100'000}) {
        for (const size_t more : {1, 60'000}) {
            World world({0, 0}, flat_plan(2), impatient(10, spins));
            const auto found = results(world, [&](int rank, Engine& engine) {
                std::vector<int32_t> data(count + (rank == 1 ? more : 0), 1);
                const Status status = engine.run(kWorld, allreduce(data));
                CHECK(data == std::vector<int32_t>(data.size(), 1));
                return status;
            });
            for (const Status& status : found) {
                CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
                CHECK_CONTAINS(status.message, "rank 1 called");
            }
        }
    }
}

TEST_WITH_SPINS(
    "over shared memory: a mismatch writes nothing after calls that matched, whose operation is used again") {
    for (const size_t count : {10, 100'000}) {
        World world({0, 0}, flat_plan(2), impatient(10, spins));
        const auto found = results(world, [&](int rank, Engine& engine) {
            for (int call = 0; call < 3; ++call) {
                auto data = numbers(count, rank, call);
                CHECK(engine.run(kWorld, allreduce(data)).ok());
                CHECK(data == sum(count, 2, call));
            }
            std::vector<int32_t> data(count, 1);
            Call call = allreduce(data);
            if (rank == 1) call.task.op = DDL_MAX;  // rank 0 takes the operation of before
            if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // and finds a message
            const Status status = engine.run(kWorld, call);
            CHECK(data == std::vector<int32_t>(count, 1));
            return status;
        });
        for (const Status& status : found) {
            CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
            CHECK_CONTAINS(status.message, "rank 1 called allreduce #3");
        }
    }
}

TEST_WITH_SPINS("over shared memory: what breaks a communicator between two calls is the error of the second") {
    World world({0, 0}, flat_plan(2), impatient(10, spins));
    const auto call = [](int rank, Engine& engine) {
        auto data = numbers(10, rank, 0);
        const Status status = engine.run(kWorld, allreduce(data));
        CHECK(data == (status.ok() ? sum(10, 2, 0) : numbers(10, rank, 0)));
        return status;
    };
    for (const Status& status : results(world, call)) CHECK(status.ok());
    world.engines[0]->fail(kWorld, {DDL_ERROR_INTERNAL, "it broke"});
    for (const Status& status : results(world, call)) {
        CHECK_EQ(status.code, DDL_ERROR_INTERNAL);
        CHECK_CONTAINS(status.message, "it broke");
    }
}

TEST_WITH_SPINS("over shared memory: a rank that dies in the middle ends the others, with its name") {
    for (const size_t count : {100, 4096, 100'000}) {
        World world({0, 0, 0, 0}, flat_plan(4), impatient(60, spins));
        const auto found = results(world, [&](int rank, Engine& engine) {
            for (int call = 0;; ++call) {
                if (rank == 2 && call == 20) {
                    world.network.kill(2);  // and calls nothing more
                    return Status{};
                }
                auto data = numbers(count, rank, call);
                const Status status = engine.run(kWorld, allreduce(data));
                if (!status.ok()) return status;
                CHECK(data == sum(count, 4, call));
            }
        });
        for (const size_t rank : {0, 1, 3}) {
            CHECK_EQ(found[rank].code, DDL_ERROR_PEER_LOST);
            CHECK_CONTAINS(found[rank].message, "rank 2 died");
        }
    }
}

TEST_WITH_SPINS(
    "over shared memory: a rank that does not come is an error after its time, and nothing is written any more") {
    World world({0, 0}, flat_plan(2), impatient(0.5, spins));
    std::vector<int32_t> data(100'000, 1);
    CHECK_EQ(world.engines[0]->run(kWorld, allreduce(data)).code, DDL_ERROR_TIMEOUT);
    CHECK(data == std::vector<int32_t>(100'000, 1));
}

TEST("over shared memory: whichever allocation fails, every request that was accepted ends, right or with an error") {
    for (const size_t count : {100, 200'000}) {
        bool failed = true;
        for (int64_t after = 0; failed && after < 3000; after += 1 + after / (check::kSanitized ? 3 : 8)) {
            EngineOptions options = test_options();
            options.patience = {0.01, 60, 100};  // a rank that was not told of an error asks
            // Longer than the engines, whose threads use it.
            std::vector<int32_t> data[] = {numbers(count, 0, 1), numbers(count, 1, 1)};
            RequestPtr requests[2];
            World world({0, 0}, flat_plan(2), options, kSmallPipe);
            fail_allocations(after, 2);
            for (size_t rank = 0; rank < 2; ++rank) {
                if (world.engines[rank]->submit(kWorld, allreduce(data[rank]), &requests[rank]).ok()) continue;
                stop_failing();  // its goodbye, by which the other learns of it, is not lost
                world.engines[rank]->shutdown();
            }
            for (size_t rank = 0; rank < 2; ++rank) {
                if (requests[rank]) world.engines[rank]->wait(requests[rank]);
            }
            if (!requests[0] || !requests[1]) continue;
            failed = stop_failing();
            for (size_t rank = 0; rank < 2; ++rank) {
                const Status& status = requests[rank]->status();
                if (status.ok()) {
                    CHECK(data[rank] == sum(count, 2, 1));
                } else {
                    CHECK_EQ(status.code, DDL_ERROR_MEMORY);
                }
            }
        }
    }
}

TEST("over shared memory: whichever allocation fails, blocking calls end, right or with an error") {
    const auto suffers = [](int64_t after) {
        EngineOptions options = test_options(50);
        options.patience = {0.01, 60, 100};  // a rank that was not told of an error asks
        World world({0, 0}, flat_plan(2), options, kSmallPipe);
        return calls_suffer(world, 20'000, after, 2);
    };
    int64_t after = 0;
    while (after < 1000 && suffers(after)) after += 1 + after / (check::kSanitized ? 3 : 8);
    CHECK(after > 10);
}
