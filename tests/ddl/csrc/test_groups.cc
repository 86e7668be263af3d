// Modes other than r, and buffers in a device's memory, through the engine: with groups and devices of this process.
#include <cmath>
#include <limits>
#include <random>

#include "base/backoff.h"
#include "check.h"
#include "late_device.h"
#include "local_groups.h"
#include "world.h"

using namespace ddl;

namespace {

// Ranks with the groups of their plan and a device each.
class GroupWorld : public World {
  public:
    GroupWorld(const Plan& plan, const EngineOptions& options) : World(plan.size(), plan, options), groups_(plan) {
        for (int rank = 0; rank < plan.size(); ++rank) {
            CHECK(engines[static_cast<size_t>(rank)]->set_groups(kWorld, groups_.of(rank)).ok());
            devices.push_back(std::make_shared<LateDevice>());
        }
    }

    // An allreduce of `rank`; on its device if `memory` says so.
    Call call(int rank, const void* in, void* out, size_t count, Memory memory, ReduceOp op = DDL_SUM) const {
        Call call{{Collective::allreduce, DDL_INT32, op, count, 0, memory}, in, out};
        if (memory == Memory::device) call.device = devices[static_cast<size_t>(rank)];
        return call;
    }

    std::vector<std::shared_ptr<LateDevice>> devices;

  private:
    LocalGroups groups_;
};

EngineOptions cut_small(int window = 16) {
    EngineOptions options = test_options();
    options.tuning.chunk_bytes = 4096;
    options.tuning.message_bytes = 0;
    options.window = window;
    return options;
}

EngineOptions impatient() {
    EngineOptions options = cut_small();
    options.patience = {0.02, 0.2, check::kSanitized ? 20.0 : 5.0};
    options.hosts = {"a", "b", "c", "d"};
    return options;
}

// Opens when it has been asked more than `most` times.
struct LateGate final : Fence {
    std::atomic<int> asked{0}, most{100};
    bool passed() override { return ++asked > most; }
};

int32_t value(int rank, size_t i, int call) { return static_cast<int32_t>(i) * (rank + 1) + call; }

int32_t sum(int size, size_t i, int call) { return static_cast<int32_t>(i) * size * (size + 1) / 2 + call * size; }

void sweep(const std::string& modes, const std::vector<int>& shape, Memory memory, int window) {
    int size = 1;
    for (const int dimension : shape) size *= dimension;
    GroupWorld world(make_plan(size, shape, modes), cut_small(window));
    world.run([&](int rank, Engine& engine) {
        // All in flight at once: what each rank starts, and when, is then up to the threads.
        const std::vector<size_t> counts = {0, 1, 7, 5000, 30011, 2, 12345, 64};
        std::vector<std::vector<int32_t>> in, out;
        std::vector<RequestPtr> requests(counts.size());
        for (size_t c = 0; c < counts.size(); ++c) {
            in.emplace_back(counts[c]);
            out.emplace_back(counts[c], -1);
            for (size_t i = 0; i < counts[c]; ++i) in[c][i] = value(rank, i, static_cast<int>(c));
            const ReduceOp op = c % 2 == 0 ? DDL_AVERAGE : DDL_SUM;
            void* const to = c % 3 == 0 ? in[c].data() : out[c].data();
            CHECK(engine.submit(kWorld, world.call(rank, in[c].data(), to, counts[c], memory, op), &requests[c]).ok());
        }
        for (size_t c = counts.size(); c-- > 0;) {
            CHECK_EQ(engine.wait(requests[c]).message, std::string());
            const auto& result = c % 3 == 0 ? in[c] : out[c];
            for (size_t i = 0; i < counts[c]; ++i) {
                const int32_t total = sum(size, i, static_cast<int>(c));
                if (result[i] == (c % 2 == 0 ? total / size : total)) continue;
                check::failed(__FILE__, __LINE__,
                              modes + ": element " + std::to_string(i) + " of " + std::to_string(counts[c]));
                break;
            }
        }
    });
    CHECK_EQ(world.network.pending(), size_t{0});
    for (const auto& device : world.devices) {
        CHECK_EQ(device->pending(), size_t{0});
        CHECK(memory == Memory::host || modes == "n" || device->count > 0);
    }
}

}  // namespace

TEST("allreduces in modes m, n and b beside rings are right, many in flight, in any window") {
    const std::vector<std::pair<std::string, std::vector<int>>> plans = {{"m", {3}},     {"mr", {2, 2}}, {"rm", {2, 3}},
                                                                         {"mm", {2, 2}}, {"nr", {2, 2}}, {"bm", {2, 2}},
                                                                         {"n", {4}},     {"r", {3}}};
    for (const auto& [modes, shape] : plans) {
        for (const int window : {1, 2, 16}) {
            sweep(modes, shape, Memory::host, window);
            sweep(modes, shape, Memory::device, window);
        }
    }
    sweep("mrm", {2, 2, 2}, Memory::host, 16);
    sweep("nrm", {2, 2, 2}, Memory::device, 5);
}

TEST("ranks that begin their calls at different times do not wait for one another in a circle, in any window") {
    constexpr int kCalls = 12;
    const std::vector<std::pair<std::string, std::vector<int>>> plans = {
        {"r", {3}}, {"rr", {2, 2}}, {"mr", {2, 2}}, {"rm", {3, 2}}, {"nr", {2, 2}}};
    for (const auto& [modes, shape] : plans) {
        const Memory memory = modes == "nr" ? Memory::device : Memory::host;
        for (const int window : {1, 4, 16}) {
            const Plan plan = make_plan(shape.size() > 1 ? shape[0] * shape[1] : shape[0], shape, modes);
            GroupWorld world(plan, cut_small(window));
            world.run([&](int rank, Engine& engine) {
                std::mt19937_64 sizes(check::seed()), pauses(check::seed() + static_cast<uint64_t>(rank) + 1);
                std::vector<std::vector<int32_t>> data;
                std::vector<RequestPtr> requests(kCalls);
                for (int c = 0; c < kCalls; ++c) {
                    data.emplace_back(sizes() % 20000);
                    for (size_t i = 0; i < data.back().size(); ++i) data.back()[i] = value(rank, i, c);
                    const Call call =
                        world.call(rank, data.back().data(), data.back().data(), data.back().size(), memory);
                    CHECK(engine.submit(kWorld, call, &requests[static_cast<size_t>(c)]).ok());
                    for (uint64_t polls = pauses() % 300; polls > 0; --polls) engine.test(requests[pauses() % (c + 1)]);
                    if (pauses() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pauses() % 500));
                }
                for (int c = 0; c < kCalls; ++c) {
                    CHECK_EQ(engine.wait(requests[static_cast<size_t>(c)]).message, std::string());
                    for (size_t i = 0; i < data[static_cast<size_t>(c)].size(); ++i) {
                        if (data[static_cast<size_t>(c)][i] == sum(plan.size(), i, c)) continue;
                        check::failed(__FILE__, __LINE__, modes + ": call " + std::to_string(c));
                        break;
                    }
                }
            });
        }
    }
}

TEST("the other collectives of buffers in a device's memory are staged") {
    constexpr int kSize = 4;
    constexpr size_t kCount = 5000;
    GroupWorld world(make_plan(kSize, {2, 2}, "nr"), cut_small());
    world.run([&](int rank, Engine& engine) {
        const auto run = [&](Collective collective, const void* in, void* out, int root = 0) {
            Call call{{collective, DDL_INT32, DDL_SUM, kCount, root, Memory::device}, in, out};
            call.device = world.devices[static_cast<size_t>(rank)];
            CHECK_EQ(engine.run(kWorld, call).message, std::string());
        };
        std::vector<int32_t> rows(kSize * kCount), all(kSize * kCount), one(kCount);
        for (size_t i = 0; i < rows.size(); ++i) rows[i] = value(rank, i, 0);
        run(Collective::reduce_scatter, rows.data(), one.data());
        for (size_t i = 0; i < kCount; ++i) CHECK_EQ(one[i], sum(kSize, static_cast<size_t>(rank) * kCount + i, 0));
        run(Collective::allgather, rows.data(), all.data());
        for (size_t i = 0; i < all.size(); ++i) CHECK_EQ(all[i], value(static_cast<int>(i / kCount), i % kCount, 0));
        run(Collective::alltoall, rows.data(), all.data());
        for (size_t i = 0; i < all.size(); ++i) {
            const size_t from = i / kCount;
            CHECK_EQ(all[i], value(static_cast<int>(from), static_cast<size_t>(rank) * kCount + i % kCount, 0));
        }
        run(Collective::broadcast, nullptr, rows.data(), 3);
        for (size_t i = 0; i < kCount; ++i) CHECK_EQ(rows[i], value(3, i, 0));
        run(Collective::barrier, nullptr, nullptr);
    });
}

TEST("a group's collective is entered by nobody before every rank has called the same") {
    for (int what = 0; what < 3; ++what) {
        GroupWorld world(make_plan(4, {2, 2}, "mr"), impatient());
        world.run([&](int rank, Engine& engine) {
            std::vector<int32_t> data(20001, 1);
            Call call = world.call(rank, data.data(), data.data(), 20000, Memory::host);
            if (rank == 3 && what == 0) call.task.count = 20001;
            if (rank == 3 && what == 1) call.task.op = DDL_MAX;
            if (rank == 3 && what == 2) call.task.collective = Collective::broadcast, call.task.root = 3;
            const Status status = engine.run(kWorld, call);
            // A broadcast's root may be done before it is known.
            if (rank == 3 && what == 2 && status.ok()) return;
            CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
            CHECK_CONTAINS(status.message, "rank 3 (host d) called");
            CHECK(data == std::vector<int32_t>(20001, 1));
        });
    }
}

TEST("modes b and n want buffers of one kind of memory, and rings do not care") {
    for (const char* modes : {"n", "r"}) {
        GroupWorld world(make_plan(2, {2}, modes), impatient());
        world.run([&](int rank, Engine& engine) {
            std::vector<int32_t> data(20000, 1);
            const Memory memory = rank == 0 ? Memory::device : Memory::host;
            const Status status = engine.run(kWorld, world.call(rank, data.data(), data.data(), data.size(), memory));
            if (modes[0] == 'r') {
                CHECK_EQ(status.message, std::string());
                CHECK(data == std::vector<int32_t>(20000, 2));
                return;
            }
            CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
            CHECK_CONTAINS(status.message, "rank 0 (host a) with a buffer in a GPU's memory");
        });
    }
}

TEST("a rank that dies in a group's collective ends the others, and no copy is left") {
    for (const Memory memory : {Memory::host, Memory::device}) {
        for (const int messages : {0, 5, 40}) {
            GroupWorld world(make_plan(4, {2, 2}, "mr"), impatient());
            world.network.kill_after(1, messages);
            const double begin = seconds_now();
            world.run([&](int rank, Engine& engine) {
                Status status;
                std::vector<int32_t> data(200000, 1);
                for (int i = 0; i < 50 && status.ok(); ++i) {
                    status = engine.run(kWorld, world.call(rank, data.data(), data.data(), data.size(), memory));
                }
                CHECK_EQ(status.code, DDL_ERROR_PEER_LOST);
            });
            CHECK(seconds_now() - begin < 4);
            for (const auto& device : world.devices) CHECK_EQ(device->pending(), size_t{0});
        }
    }
}

TEST("a rank whose GPU is busy is named by those who wait for it, and does not time out itself") {
    struct Gate final : Fence {
        std::atomic<bool> open{false};
        bool passed() override { return open; }
    };
    EngineOptions options = impatient();
    options.patience = {0.02, 0.2, 2};
    std::mutex mutex;
    std::string warnings;
    options.warn = [&](const std::string& text) {
        const std::lock_guard lock(mutex);
        warnings += text + "\n";
    };
    for (const bool all : {false, true}) {
        GroupWorld world(make_plan(2, {2}, "r"), options);
        world.run([&](int rank, Engine& engine) {
            std::vector<int32_t> data(1000, 1);
            Call call = world.call(rank, data.data(), data.data(), data.size(), Memory::device);
            const auto gate = std::make_shared<Gate>();
            if (rank == 1 || all) call.after = gate;
            RequestPtr request;
            CHECK(engine.submit(kWorld, call, &request).ok());
            // Longer than a rank may be late.
            if (all) std::this_thread::sleep_for(std::chrono::duration<double>(2 * options.patience.timeout_seconds));
            gate->open = all;
            const Status status = engine.wait(request);
            if (all) {
                CHECK_EQ(status.message, std::string());
                return;
            }
            CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
            CHECK_CONTAINS(status.message, "rank 0 (host a) has waited");
            CHECK_CONTAINS(status.message, "rank 1 (host b) has called it, and waits for its GPU, whose stream");
        });
        CHECK_CONTAINS(warnings, "(int32, sum, 1000 elements): it waits for its GPU, whose stream has not done");
    }
}

TEST("a plan with group steps but no groups is an error that says so") {
    World world(4, make_plan(4, {2, 2}, "mr"), cut_small());
    world.run([&](int, Engine& engine) {
        std::vector<int32_t> data(1000, 1);
        const Call call{{Collective::allreduce, DDL_INT32, DDL_SUM, data.size(), 0}, data.data(), data.data()};
        const Status status = engine.run(kWorld, call);
        CHECK_EQ(status.code, DDL_ERROR_INTERNAL);
        CHECK_CONTAINS(status.message, "no groups");
    });
}

TEST("an operation waits for what its buffers wait for") {
    GroupWorld world(make_plan(2, {2}, "r"), cut_small());
    world.run([&](int rank, Engine& engine) {
        std::vector<int32_t> data(1000, -1);
        Call call = world.call(rank, data.data(), data.data(), data.size(), Memory::device);
        const auto gate = std::make_shared<LateGate>();
        gate->most = std::numeric_limits<int>::max();
        call.after = gate;
        RequestPtr request;
        CHECK(engine.submit(kWorld, call, &request).ok());
        while (gate->asked < 10) std::this_thread::yield();
        CHECK(!request->finished());
        gate->most = 0;
        CHECK(engine.wait(request).ok());
        CHECK_EQ(data[0], -2);
    });
}

TEST("and so does one that has nothing to do") {
    for (const int spins : {0, 50}) {
        EngineOptions options = cut_small();
        options.spin_polls = spins;
        GroupWorld world(make_plan(1, {1}, "r"), options);
        int32_t data = 5;
        const auto gate = std::make_shared<LateGate>();
        Call call{{Collective::broadcast, DDL_INT32, DDL_SUM, 1, 0, Memory::device}, nullptr, &data};
        call.device = world.devices[0];
        call.after = gate;
        CHECK_EQ(world.engines[0]->run(kWorld, call).message, std::string());
        CHECK(gate->asked > 100);
    }
}
