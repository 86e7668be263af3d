#include <atomic>
#include <cfenv>
#include <cstring>
#include <random>

#include "base/backoff.h"
#include "base/half.h"
#include "check.h"
#include "engine/engine.h"
#include "world.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace ddl;

namespace {

using Bytes = std::vector<std::byte>;

// The processor's floating-point settings of this thread: kFlush takes and gives zeros for denormals.
#if defined(__x86_64__)
constexpr unsigned int kFlush = 0x8040, kSettings = 0xffc0;  // the rest are flags of what happened
unsigned int float_settings() { return _mm_getcsr(); }
void set_float_settings(unsigned int word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
constexpr uint64_t kFlush = 1 << 24, kSettings = ~uint64_t{0};
uint64_t float_settings() {
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word)::"memory");
    return word;
}
void set_float_settings(uint64_t word) { __asm__ volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#endif

double load(const std::byte* at, DataType type) {
    const auto get = [&](auto value) {
        std::memcpy(&value, at, sizeof value);
        return value;
    };
    switch (type) {
        case DDL_FLOAT16: return half_to_float(get(uint16_t{}));
        case DDL_BFLOAT16: return bfloat_to_float(get(uint16_t{}));
        case DDL_FLOAT32: return get(float{});
        case DDL_FLOAT64: return get(double{});
        case DDL_INT8: return get(int8_t{});
        case DDL_INT32: return get(int32_t{});
        case DDL_INT64: return static_cast<double>(get(int64_t{}));
        case DDL_UINT8: return get(uint8_t{});
    }
    return 0;
}

void store(std::byte* at, DataType type, double number) {
    const auto put = [&](auto value) { std::memcpy(at, &value, sizeof value); };
    switch (type) {
        case DDL_FLOAT16: return put(float_to_half(static_cast<float>(number)));
        case DDL_BFLOAT16: return put(float_to_bfloat(static_cast<float>(number)));
        case DDL_FLOAT32: return put(static_cast<float>(number));
        case DDL_FLOAT64: return put(number);
        case DDL_INT8: return put(static_cast<int8_t>(number));
        case DDL_INT32: return put(static_cast<int32_t>(number));
        case DDL_INT64: return put(static_cast<int64_t>(number));
        case DDL_UINT8: return put(static_cast<uint8_t>(number));
    }
}

// Small whole numbers, whose sums and products over 8 ranks every type holds exactly: any order gives the same.
double element(int rank, size_t i, ReduceOp op) {
    if (op == DDL_PRODUCT) return (static_cast<size_t>(rank) + i) % 4 == 0 ? 2 : 1;
    return static_cast<double>((static_cast<size_t>(rank) * 7 + i * 3) % 13);
}

double expected(int size, size_t i, ReduceOp op, DataType type) {
    double result = element(0, i, op);
    for (int rank = 1; rank < size; ++rank) {
        const double next = element(rank, i, op);
        switch (op) {
            case DDL_SUM:
            case DDL_AVERAGE: result += next; break;
            case DDL_MIN: result = std::min(result, next); break;
            case DDL_MAX: result = std::max(result, next); break;
            case DDL_PRODUCT: result *= next; break;
        }
    }
    if (op != DDL_AVERAGE) return result;
    // Through the type, which truncates or rounds.
    std::byte at[8];
    store(at, type, result / size);
    return load(at, type);
}

std::vector<Plan> plans_of(int size) {
    std::vector<Plan> plans{flat_plan(size)};
    if (size % 2 == 0) plans.push_back(make_plan(size, {2, size / 2}, "r"));
    if (size == 8) plans.push_back(make_plan(size, {2, 2, 2}, "r", {7, 2, 5, 0, 3, 6, 1, 4}));
    return plans;
}

// Allreduces of up to a MiB are doubled, after two halvings if there are enough ranks.
Plan halved(Plan plan) {
    plan.small_bytes = 1 << 20;
    plan.halved_above = {0, 0};
    return plan;
}

Call allreduce(const void* in, void* out, size_t count, DataType type = DDL_FLOAT32, ReduceOp op = DDL_SUM) {
    return {{Collective::allreduce, type, op, count, 0}, in, out};
}

void sweep(int size, const Plan& plan, Algorithm algorithm, const std::vector<size_t>& counts) {
    EngineOptions options = test_options();
    options.tuning.algorithm = algorithm;
    options.tuning.chunk_bytes = 4096;
    options.tuning.message_bytes = 0;
    World world(size, plan, options);
    world.run([&](int rank, Engine& engine) {
        for (int t = DDL_FLOAT16; t <= DDL_UINT8; ++t) {
            for (int o = DDL_SUM; o <= DDL_PRODUCT; ++o) {
                for (const size_t count : counts) {
                    const auto type = static_cast<DataType>(t);
                    const auto op = static_cast<ReduceOp>(o);
                    const size_t width = size_of(type);
                    Bytes in(count * width), out(count * width);
                    for (size_t i = 0; i < count; ++i) store(&in[i * width], type, element(rank, i, op));
                    const Bytes before = in;
                    const bool in_place = (count + static_cast<size_t>(t)) % 2 == 0;
                    Bytes& result = in_place ? in : out;
                    const Status status = engine.run(kWorld, allreduce(in.data(), result.data(), count, type, op));
                    CHECK_EQ(status.message, std::string());
                    if (!in_place) CHECK(in == before);
                    for (size_t i = 0; i < count; ++i) {
                        if (load(&result[i * width], type) == expected(size, i, op, type)) continue;
                        check::failed(__FILE__, __LINE__,
                                      std::string(name_of(type)) + " " + name_of(op) + " of " + std::to_string(count) +
                                          " over " + format_mode(plan) + ": element " + std::to_string(i) + " is " +
                                          std::to_string(load(&result[i * width], type)) + ", expected " +
                                          std::to_string(expected(size, i, op, type)));
                        return;
                    }
                }
            }
        }
    });
    for (auto& engine : world.engines) engine->shutdown();
    CHECK_EQ(world.network.pending(), size_t{0});
}

}  // namespace

TEST("allreduce: 1 to 8 ranks, all types and operations, all plans, against a plain loop") {
    const std::vector<size_t> counts =
        check::kSanitized ? std::vector<size_t>{0, 1, 37, 5003} : std::vector<size_t>{0, 1, 37, 1024, 20011};
    for (int size = 1; size <= 8; ++size) {
        for (const Plan& plan : plans_of(size)) {
            sweep(size, plan, Algorithm::bandwidth, counts);
            sweep(size, plan, Algorithm::latency, {0, 1, 37, 9001});
            sweep(size, halved(plan), Algorithm::automatic, {0, 1, 37, 9001});
        }
    }
}

TEST("the other collectives: 1 to 8 ranks, small and large, against a plain loop") {
    for (int size = 1; size <= 8; ++size) {
        const auto n = static_cast<size_t>(size);
        World world(size, plans_of(size).back());
        world.run([&](int rank, Engine& engine) {
            const auto r = static_cast<size_t>(rank);
            for (const size_t count : {0, 1, 33, 40000}) {
                const auto value = [&](size_t from, size_t i) { return static_cast<int32_t>(from * 1000003 + i); };
                std::vector<int32_t> block(count), blocks(count * n), out(count * n), small(count);
                for (size_t i = 0; i < count; ++i) block[i] = value(r, i);
                for (size_t i = 0; i < count * n; ++i) blocks[i] = value(r, i);
                const auto run = [&](Collective collective, const void* in, void* to, int root = 0) {
                    const Call call{{collective, DDL_INT32, DDL_SUM, count, root}, in, to};
                    CHECK_EQ(engine.run(kWorld, call).message, std::string());
                };
                run(Collective::allgather, block.data(), out.data());
                for (size_t i = 0; i < count * n; ++i) CHECK_EQ(out[i], value(i / count, i % count));
                run(Collective::alltoall, blocks.data(), out.data());
                for (size_t i = 0; i < count * n; ++i) CHECK_EQ(out[i], value(i / count, r * count + i % count));
                run(Collective::reduce_scatter, blocks.data(), small.data());
                for (size_t i = 0; i < count; ++i) {
                    uint32_t sum = 0;
                    for (size_t k = 0; k < n; ++k) sum += static_cast<uint32_t>(value(k, r * count + i));
                    CHECK_EQ(small[i], static_cast<int32_t>(sum));
                }
                for (int root = 0; root < size; ++root) {
                    std::vector<int32_t> buffer = block;
                    run(Collective::broadcast, nullptr, buffer.data(), root);
                    for (size_t i = 0; i < count; ++i) CHECK_EQ(buffer[i], value(static_cast<size_t>(root), i));
                }
                run(Collective::barrier, nullptr, nullptr);
            }
        });
    }
}

TEST("an allreduce gives the same bits on every rank and from run to run, NaNs and zeros included") {
    for (const int size : {2, 3, 5, 8}) {
        for (const Algorithm algorithm : {Algorithm::latency, Algorithm::bandwidth, Algorithm::automatic}) {
            for (const DataType type : {DDL_FLOAT16, DDL_BFLOAT16, DDL_FLOAT32, DDL_FLOAT64}) {
                for (const ReduceOp op : {DDL_SUM, DDL_AVERAGE, DDL_MIN, DDL_MAX, DDL_PRODUCT}) {
                    const size_t count = 1003, width = size_of(type);
                    std::vector<Bytes> results;
                    for (int repeat = 0; repeat < 2; ++repeat) {
                        std::vector<Bytes> out(static_cast<size_t>(size));
                        EngineOptions options = test_options();
                        options.tuning.algorithm = algorithm;
                        options.tuning.chunk_bytes = 1024;
                        options.tuning.message_bytes = 0;
                        World world(size, halved(plans_of(size).back()), options);
                        world.run([&](int rank, Engine& engine) {
                            std::mt19937_64 random(check::seed() + static_cast<uint64_t>(rank));
                            Bytes& mine = out[static_cast<size_t>(rank)];
                            mine.resize(count * width);
                            for (auto& byte : mine) byte = static_cast<std::byte>(random());  // every kind of number
                            for (size_t i = 0; i < 64; ++i) store(&mine[i * width], type, rank % 2 ? -0.0 : 0.0);
                            CHECK(engine.run(kWorld, allreduce(mine.data(), mine.data(), count, type, op)).ok());
                        });
                        results.insert(results.end(), out.begin(), out.end());
                    }
                    for (const Bytes& result : results) CHECK(result == results[0]);
                }
            }
        }
    }
}

TEST("the bits do not depend on how a caller's thread rounds, or on whether it flushes denormals") {
    struct Case {
        Algorithm algorithm;
        bool in_host;  // where small calls have a fast path
    };
    for (const auto& [algorithm, in_host] :
         {Case{Algorithm::latency, false}, Case{Algorithm::latency, true}, Case{Algorithm::bandwidth, false}}) {
        for (const ReduceOp op : {DDL_SUM, DDL_AVERAGE}) {
            EngineOptions options = test_options(in_host ? 50 : 0);
            options.tuning.algorithm = algorithm;
            const auto hosts = in_host ? std::vector<int>{0, 0, 0} : std::vector<int>{0, 1, 2};
            World world(hosts, flat_plan(3), options);
            std::vector<std::vector<float>> out(3);
            world.run([&](int rank, Engine& engine) {
                const int rounding = std::fegetround();
                if (rank == 1) std::fesetround(FE_UPWARD);
                const auto settings = float_settings();
                if (rank == 0) set_float_settings(settings | kFlush);
                const auto set = float_settings();
                for (int repeat = 0; repeat < 20;
                     ++repeat) {  // the thread that polls does the work: here mostly the caller
                    std::vector<float> data(301, 1e-40f);
                    for (size_t i = 0; i < 100; ++i) data[i] = 1.0f / static_cast<float>(3 + i + 7 * (rank + 1));
                    CHECK(engine.run(kWorld, allreduce(data.data(), data.data(), data.size(), DDL_FLOAT32, op)).ok());
                    auto& all = out[static_cast<size_t>(rank)];
                    all.insert(all.end(), data.begin(), data.end());
                }
                CHECK_EQ(float_settings() & kSettings, set & kSettings);  // left as they were
                set_float_settings(settings);
                std::fesetround(rounding);
            });
            for (size_t rank = 0; rank < 3; ++rank) {
                CHECK(std::memcmp(out[rank].data(), out[2].data(), out[2].size() * sizeof(float)) == 0);
                CHECK(bits_of(out[rank][300]) != 0u);
            }
        }
    }
}

TEST("many collectives in flight on several communicators finish in any order of waiting") {
    constexpr int kSize = 4, kCalls = 40;
    World world(kSize, make_plan(kSize, {2, 2}, "r"));
    world.run([&](int rank, Engine& engine) {
        CommId half = 0, again = 0;
        CHECK_EQ(engine.split(kWorld, rank % 2, -rank, &half).message, std::string());
        CHECK_EQ(engine.size(half), 2);
        CHECK_EQ(engine.rank(half), rank < 2 ? 1 : 0);  // the key turns the order round
        std::vector<std::vector<float>> data;
        std::vector<RequestPtr> requests;
        for (int i = 0; i < kCalls; ++i) {
            data.emplace_back(static_cast<size_t>(1 + i * 531), static_cast<float>(rank + i));
            requests.emplace_back();
            CHECK(engine
                      .submit(i % 2 ? half : kWorld,
                              allreduce(data.back().data(), data.back().data(), data.back().size()), &requests.back())
                      .ok());
        }
        while (!engine.test(requests.back())) std::this_thread::yield();
        for (int i = kCalls; i-- > 0;) {
            CHECK(engine.wait(requests[static_cast<size_t>(i)]).ok());
            const int sum = i % 2 ? (rank % 2 ? 4 : 2) + 2 * i : 6 + 4 * i;
            for (const float x : data[static_cast<size_t>(i)]) CHECK_EQ(x, static_cast<float>(sum));
        }
        CHECK(engine.free(half).ok());
        CHECK_EQ(engine.submit(half, allreduce(nullptr, nullptr, 0), &requests[0]).code, DDL_ERROR_STATE);
        CHECK(engine.split(kWorld, rank == 3 ? -1 : 0, 0, &again).ok());
        CHECK_EQ(again == kWorld, rank == 3);
    });
}

TEST(
    "blocking calls of several threads, each on its communicator, go on beside one another and behind what was begun") {
    constexpr int kSize = 2, kThreads = 3;
    const int calls = check::kSanitized ? 100 : 500;
    for (const int spins : {0, 50}) {
        EngineOptions options = test_options();
        options.spin_polls = spins;
        World world(kSize, flat_plan(kSize), options);
        world.run([&](int rank, Engine& engine) {
            std::vector<CommId> comms(kThreads);
            for (CommId& comm : comms) CHECK(engine.split(kWorld, 0, rank, &comm).ok());
            std::vector<std::thread> threads;
            for (const CommId comm : comms) {
                threads.emplace_back([&engine, comm, rank, calls] {
                    int last = 0;  // the result of the call before, which the next ones are made of
                    for (int i = 0; i < calls; ++i) {
                        float begun = static_cast<float>(rank + i + last);
                        float mine = static_cast<float>(2 * rank - i + last);
                        RequestPtr request;
                        if (i % 3 == 0) CHECK(engine.submit(comm, allreduce(&begun, &begun, 1), &request).ok());
                        CHECK(engine.run(comm, allreduce(&mine, &mine, 1)).ok());
                        CHECK_EQ(mine, static_cast<float>(2 - 2 * i + 2 * last));
                        if (request) {
                            CHECK(engine.wait(request).ok());
                            CHECK_EQ(begun, static_cast<float>(1 + 2 * i + 2 * last));
                        }
                        last = static_cast<int>(mine) % 100;
                    }
                });
            }
            for (std::thread& thread : threads) thread.join();
        });
        for (auto& engine : world.engines) engine->shutdown();
        CHECK_EQ(world.network.pending(), size_t{0});
    }
}

TEST("a communicator with a request in flight cannot be freed") {
    std::atomic<bool> tried{false};
    World world(2, flat_plan(2));
    world.run([&](int rank, Engine& engine) {
        CommId comm = 0;
        CHECK(engine.split(kWorld, 0, rank, &comm).ok());
        while (rank == 1 && !tried) std::this_thread::yield();  // so rank 0's request cannot finish before
        float x = 1;
        RequestPtr request;
        CHECK(engine.submit(comm, allreduce(&x, &x, 1), &request).ok());
        if (rank == 0) {
            CHECK_EQ(engine.free(comm).code, DDL_ERROR_STATE);
            tried = true;
        }
        CHECK(engine.wait(request).ok());
        CHECK(engine.free(comm).ok());
    });
}

TEST("every request that was accepted finishes, also when the library is shut down at that moment") {
    for (int i = 0; i < (check::kSanitized ? 100 : 1000); ++i) {
        World world(1, flat_plan(1));
        Engine& engine = *world.engines[0];
        std::vector<RequestPtr> requests;
        std::atomic<bool> begun{false};
        std::thread submitter([&] {
            for (;;) {
                RequestPtr request;
                if (!engine.submit(kWorld, allreduce(nullptr, nullptr, 0), &request).ok()) return;
                requests.push_back(std::move(request));
                begun = true;
            }
        });
        while (!begun) std::this_thread::yield();
        engine.shutdown();
        submitter.join();
        for (const RequestPtr& request : requests) {
            if (!request->finished()) return check::failed(__FILE__, __LINE__, "a request never finishes");
        }
    }
}

TEST_WITH_SPINS("every blocking call ends, also when the library is shut down at that moment") {
    for (int i = 0; i < (check::kSanitized ? 50 : 500); ++i) {
        World world(1, flat_plan(1), test_options(spins));
        Engine& engine = *world.engines[0];
        std::atomic<bool> begun{false};
        std::thread caller([&] {
            while (engine.run(kWorld, allreduce(nullptr, nullptr, 0)).ok()) begun = true;
        });
        while (!begun) std::this_thread::yield();
        engine.shutdown();
        caller.join();
    }
}

TEST("a communicator that is still being made when the library is shut down does not come to be") {
    EngineOptions options = test_options();
    Engine* engine = nullptr;
    options.plan_part = [&](const Plan& world, const std::vector<int>& members) {
        engine->shutdown();  // as another thread may
        return plan_of_part(world, members);
    };
    World world(1, flat_plan(1), options);
    engine = world.engines[0].get();
    CommId comm = kWorld;
    CHECK_EQ(engine->split(kWorld, 0, 0, &comm).code, DDL_ERROR_STATE);
    for (CommId any = 0; any < kMostCommunicators; ++any) CHECK_EQ(engine->size(any), -1);
}

TEST("buffers that overlap or are not aligned are refused") {
    World world(2, flat_plan(2));
    world.run([](int rank, Engine& engine) {
        alignas(8) std::byte bytes[256] = {};
        const auto code = [&](Collective collective, size_t in, size_t out, DataType type = DDL_FLOAT32) {
            return engine.run(kWorld, {{collective, type, DDL_SUM, 4, 0}, bytes + in, bytes + out}).code;
        };
        CHECK_EQ(code(Collective::allreduce, 1, 64), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::allreduce, 0, 66), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::allreduce, 4, 4, DDL_FLOAT64), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::broadcast, 0, 2), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::allreduce, 0, 4), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::reduce_scatter, 0, 0), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::reduce_scatter, 0, 16), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::alltoall, 0, 0), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::allgather, rank == 0 ? 16 : 0, 0), DDL_ERROR_ARGUMENT);
        CHECK_EQ(code(Collective::allgather, rank == 0 ? 0 : 16, 0), DDL_SUCCESS);
        CHECK_EQ(code(Collective::allreduce, 0, 0), DDL_SUCCESS);
        CHECK_EQ(code(Collective::allreduce, 0, 16), DDL_SUCCESS);
        CHECK_EQ(code(Collective::reduce_scatter, 0, 32), DDL_SUCCESS);
    });
}

TEST("more chunks than tags tell apart") {
    Plan plan = make_plan(4, {2, 2}, "r");
    plan.chunks = 100;
    World world(4, plan);
    world.run([](int rank, Engine& engine) {
        std::vector<float> data(50000, static_cast<float>(rank));
        CHECK_EQ(engine.run(kWorld, allreduce(data.data(), data.data(), data.size())).message, std::string());
        for (const float x : data) CHECK_EQ(x, 6.0f);
    });
}

TEST("wrong arguments start nothing and break nothing") {
    World world(2, flat_plan(2));
    world.run([&](int, Engine& engine) {
        RequestPtr request;
        float x = 1;
        CHECK_EQ(engine.run(kWorld, allreduce(nullptr, &x, 1)).code, DDL_ERROR_ARGUMENT);
        CHECK_EQ(engine.run(kWorld, allreduce(&x, nullptr, 1)).code, DDL_ERROR_ARGUMENT);
        CHECK_EQ(engine.run(kWorld, allreduce(&x, &x, SIZE_MAX)).code, DDL_ERROR_ARGUMENT);
        CHECK_EQ(engine.run(7, allreduce(&x, &x, 1)).code, DDL_ERROR_STATE);
        CHECK_EQ(engine.free(kWorld).code, DDL_ERROR_ARGUMENT);
        CHECK(engine.run(kWorld, allreduce(&x, &x, 1)).ok());
        CHECK_EQ(x, 2.0f);
    });
}

TEST("what breaks a communicator from outside is every member's error") {
    World world(3, flat_plan(3));
    world.run([&](int rank, Engine& engine) {
        if (rank == 1) engine.fail(kWorld, {DDL_ERROR_TRANSPORT, "rank 1 has no GPU"});
        const double begin = seconds_now();
        while (engine.state(kWorld).ok() && seconds_now() - begin < 20) std::this_thread::yield();
        CHECK_EQ(engine.state(kWorld).code, DDL_ERROR_TRANSPORT);
        float x = 1;
        CHECK_EQ(engine.run(kWorld, allreduce(&x, &x, 1)).message, std::string("rank 1 has no GPU"));
    });
}
