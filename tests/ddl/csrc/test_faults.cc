// Faults over the in-process network: each ends in an error that names its cause, within its time, on every rank.
#include <chrono>
#include <fstream>
#include <new>
#include <set>

#include "base/backoff.h"
#include "check.h"
#include "world.h"

using namespace ddl;

namespace {

constexpr double kAsk = 0.1, kWarn = 0.3, kTimeout = 2.0;

EngineOptions impatient(int spins = 0) {
    EngineOptions options = test_options(spins);
    options.patience = {kAsk, kWarn, kTimeout};
    options.hosts = {"a", "a", "b", "b", "c", "c", "d", "d"};
    return options;
}

// Asks and warns soon, and gives nobody up: a machine that stalls for a while is no fault.
EngineOptions asking(int spins = 0) {
    EngineOptions options = impatient(spins);
    options.patience.timeout_seconds = 60;
    return options;
}

// Patience that a fault must be found without.
EngineOptions patient(int spins = 0) {
    EngineOptions options = impatient(spins);
    options.patience = {60, 60, 60};
    return options;
}

Call allreduce(std::vector<float>& data, ReduceOp op = DDL_SUM) {
    return {{Collective::allreduce, DDL_FLOAT32, op, data.size(), 0}, data.data(), data.data()};
}

int threads_of_this_process() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        if (word == "Threads:" && status >> word) return std::stoi(word);
    }
    return -1;
}

// The result of body() on each rank, in order of ranks.
std::vector<Status> results(World& world, const std::function<Status(int, Engine&)>& body) {
    std::vector<Status> found(world.engines.size());
    world.run([&](int rank, Engine& engine) { found[static_cast<size_t>(rank)] = body(rank, engine); });
    return found;
}

}  // namespace

TEST_WITH_SPINS("ranks that disagree about a count, a type, an operation or the collective are named with both calls") {
    for (const int size : {2, 3, 4}) {
        for (const size_t count : {10, 100000}) {
            for (int what = 0; what < 4; ++what) {
                World world(size, flat_plan(size), asking(spins));
                const auto found = results(world, [&](int rank, Engine& engine) {
                    std::vector<float> data(count + 1, 1);
                    Call call = allreduce(data);
                    call.task.count = count;
                    if (rank == 1 && what == 0) call.task.count = count + 1;
                    if (rank == 1 && what == 1) call.task.type = DDL_INT32;
                    if (rank == 1 && what == 2) call.task.op = DDL_MAX;
                    if (rank == 1 && what == 3) call.task.collective = Collective::broadcast;
                    const Status status = engine.run(kWorld, call);
                    // In a pair every message is compared: nothing was written.
                    if (size == 2) CHECK(data == std::vector<float>(count + 1, 1));
                    return status;
                });
                for (const Status& status : found) {
                    CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
                    CHECK_CONTAINS(status.message, "rank 1 (host a) called");
                    CHECK_CONTAINS(status.message, "allreduce #0 of communicator 0 (float32, sum, ");
                }
            }
        }
    }
}

TEST_WITH_SPINS("a mismatch between ranks that exchange no data is found by asking") {
    // One rank takes the latency algorithm and seven the ring: it hears from none of those that it waits for.
    World world(8, flat_plan(8), asking(spins));
    const auto found = results(world, [](int rank, Engine& engine) {
        std::vector<float> data(rank == 5 ? 1 : 100000);
        return engine.run(kWorld, allreduce(data));
    });
    for (const Status& status : found) {
        CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
        CHECK_CONTAINS(status.message, "rank 5 (host c) called");
    }
}

TEST_WITH_SPINS("after an error every later call on the communicator returns it") {
    World world(2, flat_plan(2), asking(spins));
    world.run([](int rank, Engine& engine) {
        std::vector<float> data(static_cast<size_t>(rank + 1));
        const Status first = engine.run(kWorld, allreduce(data)), second = engine.run(kWorld, allreduce(data));
        CHECK_EQ(first.code, DDL_ERROR_MISMATCH);
        CHECK_EQ(second.message, first.message);
    });
}

TEST_WITH_SPINS("a rank that does not arrive is named in a warning and then in an error, with its last call") {
    std::mutex mutex;
    std::set<std::string> warnings;
    EngineOptions options = impatient(spins);
    options.warn = [&](const std::string& text) {
        const std::lock_guard lock(mutex);
        warnings.insert(text);
    };
    World world(4, flat_plan(4), options);
    const double begin = seconds_now();
    const auto found = results(world, [](int rank, Engine& engine) {
        std::vector<float> data(10);
        Status status = engine.run(kWorld, allreduce(data, DDL_MAX));
        if (rank != 2) status = engine.run(kWorld, allreduce(data));
        return status;
    });
    CHECK(seconds_now() - begin < kTimeout + 3);
    for (size_t rank = 0; rank < 4; ++rank) {
        if (rank == 2) continue;
        CHECK_EQ(found[rank].code, DDL_ERROR_TIMEOUT);
        CHECK_CONTAINS(found[rank].message, "rank 2 (host b) has not called it");
        CHECK_CONTAINS(found[rank].message, "its last call was allreduce #0 of communicator 0 (float32, max, 10");
        CHECK_CONTAINS(found[rank].message, "DDL_TIMEOUT");
    }
    CHECK(found[2].ok());
    CHECK(!warnings.empty());
    for (const std::string& text : warnings) CHECK_CONTAINS(text, "rank 2 (host b) ");  // it may not have answered yet
}

TEST("a warning may be slow, and may ask the engine") {
    std::atomic<bool> warned{false};
    Engine* asked = nullptr;
    EngineOptions options = asking();
    options.warn = [&](const std::string&) {
        CHECK_CONTAINS(asked->in_flight(), "awaiting rank 1 (host a)");
        warned = true;
    };
    World world(2, flat_plan(2), options);
    asked = world.engines[0].get();
    std::vector<float> data(10);
    RequestPtr request;
    CHECK(asked->submit(kWorld, allreduce(data), &request).ok());
    while (!warned) std::this_thread::yield();
    asked->shutdown();
}

TEST("a warning that throws ends no call, and is said all the same") {
    for (const bool waits : {false, true}) {
        std::atomic<bool> warned{false};
        EngineOptions options = asking();
        options.warn = [&](const std::string&) {
            warned = true;
            throw std::bad_alloc();
        };
        World world(2, flat_plan(2), options);
        world.run([&](int rank, Engine& engine) {
            std::vector<float> data(10);
            RequestPtr request;
            while (rank == 1 && !warned) std::this_thread::yield();
            CHECK(engine.submit(kWorld, allreduce(data), &request).ok());
            while (!waits && !request->finished()) std::this_thread::yield();  // the engine's own thread warns
            CHECK_EQ(engine.wait(request).message, std::string());
        });
    }
}

TEST_WITH_SPINS("a rank that is late but alive costs no error") {
    World world(3, flat_plan(3), asking(spins));
    const auto found = results(world, [](int rank, Engine& engine) {
        std::vector<float> data(10);
        const double begin = seconds_now();
        while (rank == 1 && seconds_now() - begin < 2 * kWarn) std::this_thread::yield();
        return engine.run(kWorld, allreduce(data));
    });
    for (const Status& status : found) CHECK_EQ(status.message, std::string());
}

TEST_WITH_SPINS("a rank that has finalized is named before the timeout") {
    World world(3, flat_plan(3), asking(spins));
    const double begin = seconds_now();
    const auto found = results(world, [](int rank, Engine& engine) {
        std::vector<float> data(10);
        if (rank == 1) {
            engine.shutdown();
            return engine.run(kWorld, allreduce(data));
        }
        return engine.run(kWorld, allreduce(data));
    });
    CHECK(seconds_now() - begin < 10);
    CHECK_EQ(found[1].code, DDL_ERROR_STATE);
    CHECK_EQ(found[0].code, DDL_ERROR_SHUTDOWN);
    CHECK_CONTAINS(found[0].message, "rank 1 (host a) has finalized without calling it");
    CHECK_CONTAINS(found[2].message, "rank 1 (host a) has finalized without calling it");
}

TEST_WITH_SPINS("a rank that has freed a communicator is named at once by those who still call it") {
    for (const bool finalizes : {false, true}) {
        World world(3, flat_plan(3), patient(spins));
        const double begin = seconds_now();
        const auto found = results(world, [&](int rank, Engine& engine) {
            std::vector<float> data(10);
            CommId part = kWorld;
            if (Status status = engine.split(kWorld, rank == 2 ? -1 : 0, rank, &part); !status.ok()) return status;
            if (rank == 2) return Status{};
            if (Status status = engine.run(part, allreduce(data)); !status.ok()) return status;
            if (rank == 0) return engine.run(part, allreduce(data));
            Status freed = engine.free(part);
            if (finalizes) engine.shutdown();
            return freed;
        });
        CHECK(seconds_now() - begin < 10);
        CHECK(found[1].ok());
        CHECK_EQ(found[0].code, DDL_ERROR_SHUTDOWN);
        CHECK_CONTAINS(found[0].message,
                       "rank 1 (host a) has freed the communicator without calling it; its last call was allreduce #0");
    }
}

TEST_WITH_SPINS(
    "a rank that shuts down for a cause ends what the others wait for, on every communicator, by that cause") {
    World world(3, flat_plan(3), patient(spins));
    const auto found = results(world, [&](int rank, Engine& engine) {
        std::vector<float> data(10);
        CommId part = kWorld;
        if (Status status = engine.split(kWorld, 0, rank, &part); !status.ok()) return status;
        if (rank != 0) return engine.run(rank == 1 ? kWorld : part, allreduce(data));
        RequestPtr own;
        CHECK(engine.submit(part, allreduce(data), &own).ok());
        engine.shutdown({DDL_ERROR_PEER_LOST, "the epoch is over"});
        return own->status();
    });
    for (const Status& status : found) {
        CHECK_EQ(status.code, DDL_ERROR_PEER_LOST);
        CHECK_EQ(status.message, std::string("the epoch is over"));
    }
}

TEST_WITH_SPINS("a rank may free a communicator as soon as its own part of each call is done") {
    World world(4, flat_plan(4), patient(spins));
    const auto found = results(world, [](int rank, Engine& engine) {
        std::vector<float> data(100000, static_cast<float>(rank));
        CommId part = kWorld;
        if (Status status = engine.split(kWorld, 0, rank, &part); !status.ok()) return status;
        Call call = allreduce(data);
        call.task.collective = Collective::broadcast;
        if (Status status = engine.run(part, call); !status.ok()) return status;
        return engine.free(part);
    });
    for (const Status& status : found) CHECK_EQ(status.message, std::string());
}

TEST_WITH_SPINS("a rank that dies in the middle is named at once, by all") {
    for (const int messages : {0, 1, 5, 17}) {
        World world(6, make_plan(6, {2, 3}, "r"), patient(spins));
        world.network.kill_after(4, messages);
        const double begin = seconds_now();
        const auto found = results(world, [](int, Engine& engine) {
            std::vector<float> data(200000);
            return engine.run(kWorld, allreduce(data));
        });
        CHECK(seconds_now() - begin < 10);
        for (size_t rank = 0; rank < 6; ++rank) {
            CHECK_EQ(found[rank].code, DDL_ERROR_PEER_LOST);
            CHECK_CONTAINS(found[rank].message, "rank 4 (host c)");
        }
    }
}

TEST_WITH_SPINS("a host that goes silent is named within the timeout") {
    World world(4, flat_plan(4), impatient(spins));
    world.network.silence(3);
    const double begin = seconds_now();
    const auto found = results(world, [](int, Engine& engine) {
        std::vector<float> data(100000);
        return engine.run(kWorld, allreduce(data));
    });
    CHECK(seconds_now() - begin < kTimeout + 3);
    for (size_t rank = 0; rank < 4; ++rank) CHECK_EQ(found[rank].code, DDL_ERROR_TIMEOUT);
    for (size_t rank = 0; rank < 3; ++rank) CHECK_CONTAINS(found[rank].message, "rank 3 (host b) does not answer");
}

TEST_WITH_SPINS("a cut link is named within the timeout") {
    World world(4, flat_plan(4), impatient(spins));
    world.network.cut(1, 2);
    const auto found = results(world, [](int, Engine& engine) {
        std::vector<float> data(100000);
        return engine.run(kWorld, allreduce(data));
    });
    for (const Status& status : found) CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
    // The rank that gives up first reports what it knows; the two ranks at the cut cannot reach each other.
    CHECK(check::contains(found[1].message, "rank 2") || check::contains(found[1].message, "no data arrives"));
}

TEST_WITH_SPINS("slow links change nothing but the time") {
    World world(3, flat_plan(3), asking(spins));
    world.network.delay(1, 0.02);
    const auto found = results(world, [](int rank, Engine& engine) {
        std::vector<float> data(5000, static_cast<float>(rank));
        const Status status = engine.run(kWorld, allreduce(data));
        for (const float x : data) CHECK_EQ(x, 3.0f);
        return status;
    });
    for (const Status& status : found) CHECK_EQ(status.message, std::string());
}

TEST("shutting down with requests in flight ends them, here and on the others, and leaves no thread") {
    const int before = threads_of_this_process();
    {
        World world(3, flat_plan(3), patient());
        std::vector<float> late(100000), data[2] = {late, late};
        RequestPtr requests[2];
        for (size_t rank = 0; rank < 2; ++rank) {
            CHECK(world.engines[rank]->submit(kWorld, allreduce(data[rank]), &requests[rank]).ok());
        }
        while (world.engines[0]->in_flight().empty()) std::this_thread::yield();
        CHECK_CONTAINS(world.engines[0]->in_flight(), "rank 0 (host a): allreduce #0");
        world.engines[0]->shutdown();
        world.engines[0]->shutdown();
        CHECK(requests[0]->finished());
        CHECK_EQ(requests[0]->status().code, DDL_ERROR_SHUTDOWN);
        const Status status = world.engines[1]->wait(requests[1]);
        CHECK_EQ(status.code, DDL_ERROR_SHUTDOWN);
        CHECK_CONTAINS(status.message, "rank 0 (host a) was finalized with allreduce #0");
        // The one that comes late is told as well.
        CHECK_EQ(world.engines[2]->run(kWorld, allreduce(late)).code, DDL_ERROR_SHUTDOWN);
    }
    CHECK_EQ(threads_of_this_process(), before);
}
