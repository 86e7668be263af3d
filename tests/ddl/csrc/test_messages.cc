// Messages between two ranks, and communicators that their members make alone.
#include <atomic>
#include <numeric>
#include <thread>

#include "base/backoff.h"
#include "check.h"
#include "engine/notice.h"
#include "world.h"

using namespace ddl;

namespace {

Mail send_of(const std::vector<float>& data, int64_t tag = 0) {
    Mail mail;
    mail.tag = tag;
    mail.type = DDL_FLOAT32;
    mail.count = data.size();
    mail.from = data.data();
    return mail;
}

Mail receive_of(std::vector<float>& data, int64_t tag = 0, int* source = nullptr) {
    Mail mail = send_of(data, tag);
    mail.incoming = true;
    mail.to = data.data();
    mail.source = source;
    return mail;
}

Status finish(Engine& engine, int peer, const Mail& mail, CommId comm = kWorld) {
    RequestPtr request;
    const Status status = engine.post(comm, peer, mail, &request);
    return status.ok() ? engine.wait(request) : status;
}

std::vector<float> numbers(size_t count, float first) {
    std::vector<float> made(count);
    std::iota(made.begin(), made.end(), first);
    return made;
}

EngineOptions patient() {
    EngineOptions options = test_options();
    options.hosts = {"a", "a", "b", "b"};
    return options;
}

EngineOptions impatient() {
    EngineOptions options = patient();
    options.patience = {0.1, 0.3, 1.0};
    return options;
}

}  // namespace

TEST("a message arrives as it was sent, short or long, empty or not") {
    for (const size_t count : {0, 1, 1000, 4096, 4097, 100000}) {
        World world(3, flat_plan(3));
        world.run([&](int rank, Engine& engine) {
            if (rank == 0) CHECK(finish(engine, 2, send_of(numbers(count, 7))).ok());
            if (rank != 2) return;
            std::vector<float> got(count);
            CHECK(finish(engine, 0, receive_of(got)).ok());
            CHECK(got == numbers(count, 7));
        });
    }
}

TEST("messages are matched by tag, and those of one tag in their order") {
    World world(2, flat_plan(2));
    world.run([&](int rank, Engine& engine) {
        constexpr int kMessages = 40;
        std::vector<std::vector<float>> data;
        std::vector<RequestPtr> requests(kMessages);
        for (int i = 0; i < kMessages; ++i) {
            data.push_back(rank == 0 ? numbers(static_cast<size_t>(i % 3 == 0 ? 9000 : 5), static_cast<float>(i))
                                     : std::vector<float>(i % 3 == 0 ? 9000 : 5));
        }
        for (int i = 0; i < kMessages; ++i) {
            // The receiver asks for the tags in another order: backwards, but forwards within each.
            const int tags = kMessages / 4;
            const int mine = rank == 0 ? i : (tags - 1 - i / 4) + tags * (i % 4);
            auto& its = data[static_cast<size_t>(mine)];
            const Mail mail = rank == 0 ? send_of(its, mine % tags) : receive_of(its, mine % tags);
            CHECK(engine.post(kWorld, 1 - rank, mail, &requests[static_cast<size_t>(mine)]).ok());
        }
        for (const RequestPtr& request : requests) CHECK_EQ(engine.wait(request).message, std::string());
        for (int i = 0; i < kMessages; ++i) {
            CHECK(data[static_cast<size_t>(i)] ==
                  numbers(static_cast<size_t>(i % 3 == 0 ? 9000 : 5), static_cast<float>(i)));
        }
    });
}

TEST("a receive from any rank takes what comes, and says from whom") {
    World world(4, flat_plan(4));
    world.run([&](int rank, Engine& engine) {
        if (rank != 2) {
            CHECK(finish(engine, 2, send_of(numbers(10000, static_cast<float>(rank)), 3)).ok());
            return;
        }
        std::vector<int> seen;
        for (int i = 0; i < 3; ++i) {
            std::vector<float> got(10000);
            int source = -1;
            CHECK(finish(engine, kAnyRank, receive_of(got, 3, &source)).ok());
            CHECK(got == numbers(10000, static_cast<float>(source)));
            seen.push_back(source);
        }
        std::sort(seen.begin(), seen.end());
        CHECK(seen == std::vector<int>({0, 1, 3}));
    });
}

TEST("messages and collectives pass one another") {
    World world(2, flat_plan(2));
    world.run([&](int rank, Engine& engine) {
        std::vector<float> data = numbers(50000, 1), sum = numbers(50000, 1);
        RequestPtr early;
        if (rank == 1) CHECK(engine.post(kWorld, 0, receive_of(data), &early).ok());
        CHECK(engine.run(kWorld, {{Collective::allreduce, DDL_FLOAT32, DDL_SUM, sum.size(), 0}, sum.data(), sum.data()})
                  .ok());
        if (rank == 0) CHECK(finish(engine, 1, send_of(data)).ok());
        if (rank == 1) CHECK(engine.wait(early).ok());
        CHECK(data == numbers(50000, 1));
        CHECK_EQ(sum[1], 4.0F);
    });
}

TEST("a message of another size or type is a mismatch on both sides") {
    World world(2, flat_plan(2), patient());
    world.run([&](int rank, Engine& engine) {
        std::vector<float> data(rank == 0 ? 20000 : 30000);
        const Status status = finish(engine, 1 - rank, rank == 0 ? send_of(data, 4) : receive_of(data, 4));
        CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
        CHECK_CONTAINS(status.message,
                       "rank 1 (host a) called receive from rank 0 (host a) on communicator 0 (tag 4, "
                       "float32, 30000 elements): it was sent with float32, 20000 elements");
    });
}

TEST("a collective that a front end makes of messages is called by its name, and not by their tag") {
    World world(2, flat_plan(2), patient());
    world.run([&](int rank, Engine& engine) {
        std::vector<float> data(rank == 0 ? 20000 : 30000);
        const int64_t tag = int64_t{1} << 42;
        const Status status = finish(engine, 1 - rank, rank == 0 ? send_of(data, tag) : receive_of(data, tag));
        CHECK_EQ(status.code, DDL_ERROR_MISMATCH);
        CHECK_CONTAINS(status.message,
                       "rank 1 (host a) called alltoall's receive from rank 0 (host a) on communicator 0 (float32, "
                       "30000 elements): it was sent with float32, 20000 elements");
    });
}

TEST("a message that no rank sends ends in time, and names who should have") {
    for (const int peer : {1, kAnyRank}) {
        World world(3, flat_plan(3), impatient());
        world.run([&](int rank, Engine& engine) {
            if (rank != 0) return;
            std::vector<float> data(10);
            const double start = seconds_now();
            const Status status = finish(engine, peer, receive_of(data, 1));
            CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
            CHECK_CONTAINS(status.message, peer == 1 ? "rank 1 (host a) has not sent it" : "no rank has sent it");
            CHECK(seconds_now() - start < 5);
        });
    }
}

TEST("a long message that moves takes longer than the timeout, and is as it was sent") {
    constexpr double kTimeout = check::kSanitized ? 6 : 3;
    EngineOptions options = test_options();
    options.patience = {0.1, kTimeout, kTimeout};
    std::mutex mutex;
    std::vector<std::string> warnings;
    options.warn = [&](const std::string& text) {
        const std::lock_guard lock(mutex);
        warnings.push_back(text);
    };
    World world(2, flat_plan(2), options);
    constexpr size_t kCount = 30000000;  // 15 pieces, of which two are under way at once
    world.network.delay(0, kTimeout / 6);
    const auto expected = numbers(kCount, 3);
    std::vector<float> got(kCount);  // made before: the sender would wait for it
    const double start = seconds_now();
    world.run([&](int rank, Engine& engine) {
        if (rank == 0) CHECK_EQ(finish(engine, 1, send_of(expected)).message, std::string());
        if (rank == 0) return;
        CHECK_EQ(finish(engine, 0, receive_of(got)).message, std::string());
        CHECK(seconds_now() - start > kTimeout);
        CHECK(got == expected);
    });
    for (const std::string& text : warnings) CHECK_EQ(text, std::string());
}

TEST("a message whose sender falls silent on the way ends on both sides, and says how much came") {
    EngineOptions options = patient();
    options.patience = {0.1, 1, 3};
    World world(2, flat_plan(2), options);
    std::vector<float> sent(10000000), got(sent.size());
    RequestPtr sending, receiving;
    world.network.delay(0, 1);
    CHECK(world.engines[0]->post(kWorld, 1, send_of(sent), &sending).ok());  // the envelope and two pieces are out
    world.network.silence(0);
    CHECK(world.engines[1]->post(kWorld, 0, receive_of(got), &receiving).ok());
    world.run([&](int rank, Engine& engine) {
        const Status& status = engine.wait(rank == 0 ? sending : receiving);
        CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
        CHECK_CONTAINS(status.message, rank == 0 ? "rank 1 (host a) has taken only 16777216 of 40000000 bytes of it"
                                                 : "rank 0 (host a) has sent it, but its data does not arrive: "
                                                   "16777216 of 40000000 bytes are here");
    });
}

TEST("a message that no rank asks for ends in time, and says so") {
    World world(2, flat_plan(2), impatient());
    std::vector<float> data(10000);
    const Status status = finish(*world.engines[0], 1, send_of(data));
    CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
    CHECK_CONTAINS(status.message, "rank 1 (host a) has not taken it");
}

TEST("who waits for ranks that have all finalized is told, long before the timeout") {
    for (const int peer : {1, kAnyRank}) {
        EngineOptions options = test_options();
        options.patience.warn_seconds = 0.5;
        World world(3, flat_plan(3), options);
        std::vector<float> data(10), early(10);
        RequestPtr first, second;
        CHECK(world.engines[0]->post(kWorld, peer, receive_of(data), &first).ok());
        CHECK(world.engines[0]->post(kWorld, peer, receive_of(early), &second).ok());
        // What was sent before still arrives.
        world.network.delay(1, 0.2);
        CHECK(finish(*world.engines[1], 0, send_of(numbers(10, 5))).ok());
        world.network.delay(1, 0);
        world.engines[1]->shutdown();
        world.engines[2]->shutdown();
        CHECK(world.engines[0]->wait(first).ok());
        CHECK(data == numbers(10, 5));
        const Status& status = world.engines[0]->wait(second);
        CHECK_EQ(status.code, DDL_ERROR_SHUTDOWN);
        CHECK_CONTAINS(status.message, peer == 1 ? "rank 1 has finalized" : "every rank that could send it has");
    }
}

TEST("who waits for a rank that has freed the communicator is told, long before the timeout") {
    EngineOptions options = test_options();
    options.patience.warn_seconds = 0.5;
    World world(2, flat_plan(2), options);
    world.run([&](int rank, Engine& engine) {
        CommId comm = kWorld;
        CHECK(engine.split(kWorld, 0, rank, &comm).ok());
        std::vector<float> data(10);
        RequestPtr request;
        if (rank == 1) {
            world.network.delay(1, 1);
            CHECK(engine.post(comm, 0, send_of(data), &request).ok());
            CHECK(engine.wait(request).ok());
            world.network.delay(1, 0);
            CHECK(engine.free(comm).ok());
            return;
        }
        CHECK(engine.post(comm, 1, receive_of(data), &request).ok());
        CHECK(engine.wait(request).ok());  // what was sent before has two seconds to arrive
        CHECK(engine.post(comm, 1, receive_of(data), &request).ok());
        const Status& status = engine.wait(request);
        CHECK_EQ(status.code, DDL_ERROR_SHUTDOWN);
        CHECK_CONTAINS(status.message, "rank 1 has freed the communicator");
    });
}

TEST("a timeout of a communicator's own holds for its messages and its collectives") {
    EngineOptions options = test_options();  // 100 s
    World world(2, flat_plan(2), options);
    world.run([&](int rank, Engine& engine) {
        CHECK_EQ(engine.set_timeout(kWorld, 0).code, DDL_ERROR_ARGUMENT);
        CHECK(engine.set_timeout(kWorld, 0.5).ok());
        if (rank == 1) return;
        std::vector<float> data(10);
        const Status status = finish(engine, 1, receive_of(data));
        CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
        CHECK_CONTAINS(status.message, "DDL_TIMEOUT, or ddl_comm_set_timeout for one communicator, sets");
    });
    World other(2, flat_plan(2), options);
    other.run([&](int rank, Engine& engine) {
        CHECK(engine.set_timeout(kWorld, 0.5).ok());
        if (rank != 0) return;
        const Status status = engine.run(kWorld, {});
        CHECK_EQ(status.code, DDL_ERROR_TIMEOUT);
        CHECK_CONTAINS(status.message, "rank 1 has not called it");  // it was asked in time
        CHECK_CONTAINS(status.message, "DDL_TIMEOUT, or ddl_comm_set_timeout for one communicator, sets");
    });
}

TEST("a rank that dies ends the messages that are awaited from it") {
    World world(2, flat_plan(2), patient());
    world.run([&](int rank, Engine& engine) {
        if (rank == 1) return world.network.kill(1);
        std::vector<float> data(10);
        const Status status = finish(engine, 1, receive_of(data));
        CHECK_EQ(status.code, DDL_ERROR_PEER_LOST);
        CHECK_CONTAINS(status.message, "rank 1 (host a) died");
    });
}

TEST("a rank that says again that it has left, and others that leave, give no second grace") {
    constexpr int kRanks = 10;
    World world(kRanks, flat_plan(kRanks));
    NoticeContent goodbye;
    goodbye.kind = NoticeKind::goodbye;
    std::vector<float> got(1);
    RequestPtr request;
    CHECK(world.engines[0]->post(kWorld, 1, receive_of(got), &request).ok());
    for (int rank = 2; rank < kRanks && !request->finished(); ++rank) {
        for (const int leaving : {1, rank}) send_notice(*world.network.transport(leaving), {0}, goodbye);
        std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    CHECK(request->finished());
    CHECK_EQ(world.engines[0]->wait(request).code, DDL_ERROR_SHUTDOWN);
}

namespace {

// A transport that finds rank 1 to have left, from a moment on.
class Leaving final : public Transport {
  public:
    Leaving(std::unique_ptr<Transport> inner, std::atomic<bool>& left, std::atomic<int>& asked)
        : inner_(std::move(inner)), left_(left), asked_(asked) {}
    int rank() const override { return inner_->rank(); }
    int size() const override { return inner_->size(); }
    Ticket isend(int peer, Tag tag, const void* data, size_t bytes) override {
        return inner_->isend(peer, tag, data, bytes);
    }
    Ticket irecv(int peer, Tag tag, void* data, size_t capacity) override {
        return inner_->irecv(peer, tag, data, capacity);
    }
    Progress test(Ticket ticket, size_t* received) override { return inner_->test(ticket, received); }
    bool cancel(Ticket ticket) override { return inner_->cancel(ticket); }
    void notify(int peer, const void* data, size_t bytes) override { inner_->notify(peer, data, bytes); }
    bool next_notice(Notice* notice) override { return inner_->next_notice(notice); }
    bool is_dead(int rank) const override { return inner_->is_dead(rank); }
    bool has_left(int rank) const override {
        if (rank == 1 && left_) ++asked_;
        return rank == 1 && left_;
    }

  private:
    const std::unique_ptr<Transport> inner_;
    std::atomic<bool>& left_;
    std::atomic<int>& asked_;
};

}  // namespace

TEST("a goodbye says which call a rank made last, though the transport found before that it has left") {
    LocalNetwork network(3);
    std::atomic<bool> left{false};
    std::atomic<int> asked{0};
    std::vector<std::unique_ptr<Engine>> engines;
    for (int rank = 0; rank < 3; ++rank) {
        std::unique_ptr<Transport> its = network.transport(rank);
        if (rank == 0) its = std::make_unique<Leaving>(std::move(its), left, asked);
        engines.push_back(std::make_unique<Engine>(std::move(its), flat_plan(3), test_options()));
    }
    // Whoever is asked about is looked at again, with all that was heard meanwhile.
    const auto look = [&] {
        const double deadline = seconds_now() + 60;
        for (const int goal = asked + 3; asked < goal && seconds_now() < deadline;) Backoff(0, 1e-3).nap();
    };
    std::vector<float> got(1);
    RequestPtr letter, barrier;
    CHECK(engines[0]->post(kWorld, kAnyRank, receive_of(got), &letter).ok());
    left = true;
    look();
    NoticeContent goodbye;
    goodbye.kind = NoticeKind::goodbye;
    goodbye.call.magic = kHeaderMagic;
    goodbye.call.sequence = 1;  // after the barrier
    send_notice(*network.transport(1), {0}, goodbye);
    look();
    const Call call{{Collective::barrier, DDL_UINT8, DDL_SUM, 0, 0}, nullptr, nullptr};
    CHECK(engines[0]->submit(kWorld, call, &barrier).ok());
    look();
    CHECK(!engines[0]->test(barrier));
    std::thread other([&] { CHECK(engines[1]->run(kWorld, call).ok()); });
    CHECK(engines[2]->run(kWorld, call).ok());
    other.join();
    CHECK_EQ(engines[0]->wait(barrier).message, std::string());
}

TEST("what a message cannot be is refused") {
    World world(2, flat_plan(2));
    Engine& engine = *world.engines[0];
    std::vector<float> data(4);
    CHECK_CONTAINS(finish(engine, 2, send_of(data)).message, "peer 2 is no rank");
    CHECK_CONTAINS(finish(engine, -1, send_of(data)).message, "peer -1 is no rank");
    CHECK_CONTAINS(finish(engine, 0, send_of(data)).message, "with itself");
    Mail null = send_of(data);
    null.from = nullptr;
    CHECK_CONTAINS(finish(engine, 1, null).message, "NULL");
    Mail odd = send_of(data);
    odd.from = reinterpret_cast<const std::byte*>(data.data()) + 1;
    CHECK_CONTAINS(finish(engine, 1, odd).message, "not aligned");
    Mail huge = send_of(data);
    huge.count = uint64_t{1} << 62;
    CHECK_CONTAINS(finish(engine, 1, huge).message, "more than memory");
    Mail untyped = send_of(data);
    untyped.type = static_cast<DataType>(99);
    CHECK_CONTAINS(finish(engine, 1, untyped).message, "type 99");
}

TEST("a communicator with messages in flight is not freed, and shutdown ends them") {
    World world(2, flat_plan(2));
    std::vector<RequestPtr> requests(2);
    std::vector<float> data(10);
    world.run([&](int rank, Engine& engine) {
        CommId comm = 0;
        CHECK(engine.split(kWorld, 0, 0, &comm).ok());
        if (rank == 1) return;
        CHECK(engine.post(comm, 1, receive_of(data), &requests[0]).ok());
        CHECK_EQ(engine.free(comm).code, DDL_ERROR_STATE);
        engine.shutdown();
        CHECK_EQ(requests[0]->status().code, DDL_ERROR_SHUTDOWN);
    });
}

TEST("members make a communicator without the other ranks, in the order that they give") {
    World world(4, flat_plan(4));
    world.run([&](int rank, Engine& engine) {
        if (rank == 1) return;
        const std::vector<int> members{3, 0, 2};
        CommId comm = 0;
        CHECK_EQ(engine.create_group(members, 0, &comm).message, std::string());
        const auto at = std::find(members.begin(), members.end(), rank) - members.begin();
        CHECK_EQ(engine.rank(comm), static_cast<int>(at));
        CHECK_EQ(engine.size(comm), 3);
        std::vector<int32_t> mine{rank}, all(3);
        CHECK(engine.run(comm, {{Collective::allgather, DDL_INT32, DDL_SUM, 1, 0}, mine.data(), all.data()}).ok());
        CHECK(all == std::vector<int32_t>({3, 0, 2}));
    });
}

TEST("groups and splits that are made at once on several threads get different communicators") {
    for (int repeat = 0; repeat < 10; ++repeat) {
        World world(3, flat_plan(3));
        std::vector<std::vector<CommId>> made(3, std::vector<CommId>(3));
        world.run([&](int rank, Engine& engine) {
            auto& mine = made[static_cast<size_t>(rank)];
            std::thread pair([&] {
                if (rank != 1) CHECK(engine.create_group({0, 2}, 1, &mine[0]).ok());
            });
            std::thread all([&] { CHECK(engine.create_group({2, 1, 0}, 2, &mine[1]).ok()); });
            CHECK(engine.split(kWorld, 0, 0, &mine[2]).ok());
            pair.join();
            all.join();
        });
        CHECK(made[0] == made[2]);
        CHECK_EQ(made[0][1], made[1][1]);
        CHECK_EQ(made[0][2], made[1][2]);
        CHECK(made[0][0] != made[0][1] && made[0][1] != made[0][2] && made[0][0] != made[0][2]);
    }
}

TEST("a group that this rank is no part of, or that names a rank twice, is refused") {
    World world(2, flat_plan(2));
    CommId comm = 0;
    for (const std::vector<int>& wrong : {std::vector<int>{}, {1}, {0, 0}, {0, 2}, {-1, 0}}) {
        CHECK_EQ(world.engines[0]->create_group(wrong, 0, &comm).code, DDL_ERROR_ARGUMENT);
    }
    CHECK(world.engines[0]->create_group({0}, 0, &comm).ok());
    CHECK_EQ(world.engines[0]->size(comm), 1);
}
