// What an operation, and a request, do with messages that the transport cannot take back.
#include <thread>

#include "backoff.h"
#include "check.h"
#include "engine.h"
#include "notice.h"
#include "transport_local.h"
#include "world.h"

using namespace ddl;

namespace {

// A transport that takes nothing back until it is told to, as MPI does with what is half under way.
class Stubborn final : public Transport {
  public:
    struct Control {
        std::atomic<bool> holds{true};
        std::atomic<int> receives{0};  // posted
        const void* sent_from = nullptr;
    };

    Stubborn(std::unique_ptr<Transport> inner, Control& control) : inner_(std::move(inner)), control_(control) {}

    int rank() const override { return inner_->rank(); }
    int size() const override { return inner_->size(); }
    Ticket isend(int peer, Tag tag, const void* data, size_t bytes) override {
        control_.sent_from = data;
        return inner_->isend(peer, tag, data, bytes);
    }
    Ticket irecv(int peer, Tag tag, void* data, size_t capacity) override {
        ++control_.receives;
        return inner_->irecv(peer, tag, data, capacity);
    }
    Progress test(Ticket ticket, size_t* received) override {
        if (cancelled_ && !control_.holds) return inner_->cancel(ticket), Progress::done;
        return inner_->test(ticket, received);
    }
    bool cancel(Ticket ticket) override {
        cancelled_ = true;
        return !control_.holds && inner_->cancel(ticket);
    }
    void notify(int peer, const void* data, size_t bytes) override { inner_->notify(peer, data, bytes); }
    bool next_notice(Notice* notice) override { return inner_->next_notice(notice); }
    bool is_dead(int rank) const override { return inner_->is_dead(rank); }

  private:
    const std::unique_ptr<Transport> inner_;
    Control& control_;
    bool cancelled_ = false;
};

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
        send_notice(*peer, 0, abort);
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
