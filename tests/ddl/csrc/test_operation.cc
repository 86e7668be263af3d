// Operations and requests with messages that the transport cannot take back.
#include <algorithm>
#include <thread>

#include "base/backoff.h"
#include "check.h"
#include "engine/engine.h"
#include "engine/notice.h"
#include "stubborn.h"
#include "transport/transport_local.h"
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

}  // namespace

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
