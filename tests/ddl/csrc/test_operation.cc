// Operations and requests with messages that the transport cannot take back.
#include <algorithm>
#include <new>
#include <thread>

#include "allocation.h"
#include "base/backoff.h"
#include "check.h"
#include "engine/engine.h"
#include "engine/notice.h"
#include "local_transport.h"
#include "stubborn.h"
#include "world.h"

using namespace ddl;

namespace {

constexpr Tag kHeaderTag = kChunkSlots;  // of the world's first collective
const Task kBroadcast{Collective::broadcast, DDL_UINT8, DDL_SUM, 100000, 1};

// Rank 0 of two, which is in the middle of receiving a broadcast from rank 1 when that says that it has failed.
struct HalfReceived {
    explicit HalfReceived(double settle_seconds) {
        EngineOptions options = test_options();
        options.settle_seconds = settle_seconds;
        engine = std::make_unique<Engine>(std::make_unique<Stubborn>(network.transport(0), control), plan, options);
        const PackedHeader header = pack(make_header(kBroadcast, {}, 0, layout_of(plan, options.tuning)));
        peer->isend(0, kHeaderTag, &header, sizeof header);
        CHECK(engine->submit(kWorld, {kBroadcast, nullptr, buffer.data()}, &request).ok());
        while (control.receives < 2) std::this_thread::yield();  // the header's, and the payload's into the buffer
        NoticeContent abort;
        abort.kind = NoticeKind::abort;
        abort.code = DDL_ERROR_TRANSPORT;
        abort.text = "a fault";
        send_notice(*peer, {0}, abort);
    }

    LocalNetwork network{2};
    Plan plan = flat_plan(2);
    Stubborn::Control control;
    std::unique_ptr<Transport> peer = network.transport(1);
    std::vector<std::byte> buffer = std::vector<std::byte>(kBroadcast.count);
    std::unique_ptr<Engine> engine;
    RequestPtr request;
};

// Two ranks of a host, each with an allreduce in place of ten numbers, one more on rank 1.
struct FastPair {
    std::unique_ptr<Operation> make(int rank, const Task& its_task) {
        auto schedule = std::make_shared<const Schedule>(make_schedule(flat_plan(2), rank, its_task));
        float* const its = data[rank].data();
        return std::make_unique<Operation>(std::move(schedule), its, its, make_header(its_task, {}, 0, 0), group, rank,
                                           0, 1, *transports[static_cast<size_t>(rank)], pool);
    }
    bool finish(Operation& one, Operation& other) {
        for (int i = 0; i < 100; ++i) {
            for (auto& transport : transports) transport->poll();
            if (!one.finished()) one.poll();
            if (!other.finished()) other.poll();
        }
        return one.finished() && other.finished();
    }

    const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, 10, 0};
    const Group group{{0, 1}, {"rank 0", "rank 1"}};
    LocalNetwork network{2};
    Transports transports = shared_transports(network, 1024);
    ScratchPool pool;
    std::vector<float> data[2] = {std::vector<float>(10, 1), std::vector<float>(10, 2)};
};

}  // namespace

TEST("the fast path is for messages that a host's pipes carry, with a header, one each way in a round") {
    const auto is_fast = [](const std::vector<int>& host_of, int rank, const Task& task, size_t pipe_bytes = 0) {
        const int size = static_cast<int>(host_of.size());
        LocalNetwork network(size);
        const Transports transports = shared_transports(network, host_of, pipe_bytes);
        Group group;
        for (int member = 0; member < size; ++member) {
            group.members.push_back(member);
            group.names.push_back("a rank");
        }
        ScratchPool pool;
        std::vector<std::byte> data(1 << 20);
        auto schedule = std::make_shared<const Schedule>(make_schedule(flat_plan(size), rank, task));
        const Operation operation(std::move(schedule), data.data(), data.data(), make_header(task, {}, 0, 0), group,
                                  rank, 0, 1, *transports[static_cast<size_t>(rank)], pool);
        return operation.is_fast();
    };
    const auto sum_of = [](size_t count) { return Task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0}; };
    CHECK(is_fast({0, 0}, 0, sum_of(10)));
    CHECK(is_fast({0, 0, 0}, 1, sum_of(4096)));
    CHECK(!is_fast({0, 0}, 0, sum_of(4097)));
    CHECK(!is_fast({0, 0}, 0, sum_of(100), 1024));  // longer than such a pipe carries
    CHECK(!is_fast({0, 1}, 0, sum_of(10)));
    CHECK(!is_fast({0, 0, 1, 1}, 0, sum_of(10)));
    CHECK(is_fast({0, 0, 0, 0, 0}, 3, {Collective::barrier, DDL_UINT8, DDL_SUM, 0, 0}));
    CHECK(is_fast({0, 0}, 1, {Collective::allgather, DDL_FLOAT32, DDL_SUM, 10, 0}));
    CHECK(is_fast({0, 0}, 1, {Collective::alltoall, DDL_FLOAT32, DDL_SUM, 10, 0}));
    CHECK(is_fast({0, 0, 0}, 2, {Collective::broadcast, DDL_FLOAT32, DDL_SUM, 10, 0}));
}

TEST("on the fast path a message that is there is reduced at once, and one that is not there later") {
    FastPair pair;
    const auto first = pair.make(0, pair.task), second = pair.make(1, pair.task);
    first->run_fast(1);
    CHECK(!first->finished());
    second->run_fast(1);
    CHECK(second->finished());
    CHECK(pair.finish(*first, *second));
    for (const auto& its : pair.data) CHECK(its == std::vector<float>(10, 3));
}

TEST("on the fast path a message that finds no room in its pipe is kept and sent later, if there is memory") {
    for (const bool is_short : {false, true}) {
        FastPair pair;
        Transport &mine = *pair.transports[0], &its = *pair.transports[1];
        const auto first = pair.make(0, pair.task), second = pair.make(1, pair.task);
        second->run_fast(1);
        const float filler[50] = {};
        int fillers = 0;
        while (mine.send_now(1, 1000, filler, sizeof filler, nullptr, 0)) ++fillers;
        CHECK(!mine.send_now(1, 1000, filler, 64, nullptr, 0));
        CHECK(fillers > 0);
        if (is_short) fail_allocations(0, 1);
        bool failed = false;
        try {
            first->run_fast(1);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        CHECK_EQ(stop_failing(), is_short);
        CHECK_EQ(failed, is_short);
        CHECK(!first->finished());
        CHECK(pair.data[0] == std::vector<float>(10, is_short ? 1.0f : 3.0f));
        std::vector<float> room(50);
        for (; fillers > 0; --fillers) {
            const Ticket ticket = its.irecv(0, 1000, room.data(), sizeof filler);
            size_t received = 0;
            CHECK(its.test(ticket, &received) == Progress::done);
        }
        if (is_short) {
            first->cancel();
            CHECK(first->settled());
        } else {
            CHECK(pair.finish(*first, *second));
            for (const auto& data : pair.data) CHECK(data == std::vector<float>(10, 3));
        }
    }
}

TEST("on the fast path a message of another call is left to the ordinary one, which refuses it") {
    FastPair pair;
    Task other = pair.task;
    other.op = DDL_MAX;
    const auto first = pair.make(0, pair.task), second = pair.make(1, other);
    first->run_fast(1);
    second->run_fast(1);
    CHECK(!pair.finish(*first, *second));
    CHECK_EQ(first->status().code, DDL_ERROR_MISMATCH);
    CHECK_EQ(second->status().code, DDL_ERROR_MISMATCH);
    CHECK(pair.data[0] == std::vector<float>(10, 1) && pair.data[1] == std::vector<float>(10, 2));
}

TEST("an operation keeps its own memory for as long as the transport may read it") {
    LocalNetwork network(2, 0);  // no message is copied when it is sent
    Stubborn::Control control;
    Stubborn transport(network.transport(0), control);
    ScratchPool pool;
    const Plan plan = flat_plan(2);
    const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, 100, 0};
    const auto schedule = std::make_shared<const Schedule>(make_schedule(plan, 0, task));
    const Group group{{0, 1}, {"rank 0", "rank 1"}};
    std::vector<float> data(100);
    auto operation = std::make_unique<Operation>(schedule, data.data(), data.data(), make_header(task, {}, 0, 0), group,
                                                 0, 0, 1, transport, pool);
    operation->poll();
    operation->cancel();
    operation->settle();
    CHECK(!operation->settled());
    CHECK(!operation->is_written());  // what it still receives goes to its own memory first
    const void* const block = control.sent_from;
    CHECK(block != data.data());
    CHECK(pool.take(sizeof(PackedHeader) + sizeof(float) * 100).data() != block);
    control.holds = false;
    operation->settle();
    CHECK(operation->settled());
}

TEST("the window is that of all calls together: the first has it whole, and those behind it a chunk each") {
    constexpr int kWindow = 8, kCalls = 3;
    LocalNetwork network(2);
    Stubborn::Control control;
    EngineOptions options = test_options();
    options.window = kWindow;
    Plan plan = flat_plan(2);
    plan.chunks = 64;
    std::vector<std::vector<float>> data(2 * kCalls, std::vector<float>(1 << 20, 1.0f));
    std::vector<RequestPtr> requests(2 * kCalls);
    const auto call = [&](Engine& engine, size_t from) {
        for (size_t i = from; i < from + kCalls; ++i) {
            const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, data[i].size(), 0};
            CHECK(engine.submit(kWorld, {task, data[i].data(), data[i].data()}, &requests[i]).ok());
        }
    };
    Engine first(std::make_unique<Stubborn>(network.transport(0), control), plan, options);
    call(first, 0);
    constexpr int kSends = kCalls + kWindow + kCalls - 1;  // a header each, and the chunks
    while (control.sends < kSends) std::this_thread::yield();
    for (int polls = 0; polls < 1000; ++polls) first.test(requests[kCalls - 1]);
    CHECK_EQ(control.sends.load(), kSends);
    Engine second(network.transport(1), plan, options);
    call(second, kCalls);
    for (size_t i = 0; i < data.size(); ++i) {
        CHECK((i < kCalls ? first : second).wait(requests[i]).ok());
        CHECK(std::count(data[i].begin(), data[i].end(), 2.0f) == 1 << 20);
    }
}

TEST("after an error a request is held back while a message may still be written into its buffer") {
    HalfReceived half(60);
    const double begin = seconds_now();
    while (seconds_now() - begin < 0.1) CHECK(!half.engine->test(half.request));
    CHECK_EQ(half.engine->free(kWorld).code, DDL_ERROR_ARGUMENT);
    CHECK_CONTAINS(half.engine->in_flight(), "broadcast #0");
    half.control.holds = false;
    const Status& status = half.engine->wait(half.request);
    CHECK_EQ(status.code, DDL_ERROR_TRANSPORT);
    CHECK_EQ(status.message, std::string("a fault"));
    CHECK_EQ(half.network.pending(), size_t{0});
}

TEST("but not for ever, and not where the sender is dead") {
    constexpr double kSettle = 0.1;
    for (const bool dies : {false, true}) {
        HalfReceived half(dies ? 60 : kSettle);
        const double begin = seconds_now();
        if (dies) half.network.kill(1);
        CHECK_EQ(half.engine->wait(half.request).code, DDL_ERROR_TRANSPORT);
        CHECK(seconds_now() - begin < 30);
        RequestPtr later;
        CHECK(half.engine->submit(kWorld, {kBroadcast, nullptr, half.buffer.data()}, &later).ok());
        CHECK_EQ(half.engine->wait(later).message, std::string("a fault"));
        half.control.holds = false;  // for the sanitizers: what is never taken back is never freed
        while (half.network.pending() > 0) half.engine->test(later), std::this_thread::yield();
    }
}

TEST("a message that has failed is its caller's at once, and its envelope the transport's until that is done with it") {
    LocalNetwork network(2, 0);  // no message is copied when it is sent
    const auto peer = network.transport(1);
    Stubborn::Control control;
    const std::vector<std::byte> data(100, std::byte{7});
    static const void* volatile left = nullptr;  // where leak checkers find it
    for (const bool closes : {false, true}) {
        auto engine = std::make_unique<Engine>(std::make_unique<Stubborn>(network.transport(0), control), flat_plan(2),
                                               test_options());
        RequestPtr request;
        Mail mail;
        mail.count = data.size();
        mail.from = data.data();
        CHECK(engine->post(kWorld, 1, mail, &request).ok());
        left = control.sent_from;
        CHECK(left != data.data());
        if (closes) {
            engine.reset();  // the memory is left to the transport for ever
            CHECK_EQ(request->status().code, DDL_ERROR_SHUTDOWN);
        } else {
            engine->fail(kWorld, {DDL_ERROR_TRANSPORT, "a fault"});
            CHECK_EQ(engine->wait(request).message, std::string("a fault"));
        }
        constexpr size_t kEnvelope = 64;
        std::vector<std::byte> got(kEnvelope + data.size());
        const int over = control.over;
        const Ticket ticket = peer->irecv(0, Tag{1} << (kTagBits - 1), got.data(), got.size());
        size_t received = 0;
        CHECK(peer->test(ticket, &received) == Progress::done);
        CHECK_EQ(received, got.size());
        CHECK(std::equal(data.begin(), data.end(), got.begin() + kEnvelope));
        const double begin = seconds_now();
        while (!closes && control.over == over && seconds_now() - begin < 20) std::this_thread::yield();
        CHECK_EQ(control.over - over, closes ? 0 : 1);
        CHECK_EQ(network.pending(), size_t{0});
    }
}
