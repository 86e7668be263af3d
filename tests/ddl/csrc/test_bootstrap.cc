#include <atomic>
#include <mutex>
#include <set>

#include "base/backoff.h"
#include "base/status.h"
#include "check.h"
#include "engine/notice.h"
#include "talk.h"
#include "transport/bootstrap.h"
#include "world.h"

using namespace ddl;

TEST("a barrier lets nobody pass before everybody has come") {
    for (const int size : {1, 2, 3, 5, 8}) {
        LocalNetwork network(size);
        std::vector<int> members;
        for (int rank = 0; rank < size; ++rank) members.push_back(rank);
        std::atomic<int> came{0};
        talk(network, [&](Bootstrap& bootstrap) {
            for (int round = 1; round <= 3; ++round) {
                ++came;
                bootstrap.barrier(members, 5);
                CHECK(came >= round * size);
                bootstrap.barrier(members, 5);
            }
        });
        CHECK_EQ(network.pending(), size_t{0});
    }
}

TEST("a barrier of some ranks needs no others") {
    LocalNetwork network(4);
    talk(network, [&](Bootstrap& bootstrap) {
        if (bootstrap.rank() % 2 == 1) bootstrap.barrier({1, 3}, 0);
    });
    CHECK_EQ(network.pending(), size_t{0});
}

TEST("what rank 0 has reaches everyone, short or long") {
    for (const int size : {1, 2, 3, 6, 8}) {
        for (const size_t bytes : {0, 1, 100'000}) {
            LocalNetwork network(size);
            talk(network, [&](Bootstrap& bootstrap) {
                std::vector<std::byte> data;
                if (bootstrap.rank() == 0) data.assign(bytes, std::byte{7});
                bootstrap.broadcast(data, 3, 0);
                CHECK(data == std::vector<std::byte>(bytes, std::byte{7}));
            });
            CHECK_EQ(network.pending(), size_t{0});
        }
    }
}

TEST("where one rank fails, the others' waits end with its error") {
    LocalNetwork network(4);
    const auto errors = talk(network, [](Bootstrap& bootstrap) {
        if (bootstrap.rank() == 2) throw Error(DDL_ERROR_MEMORY, "rank 2 has no room");
        bootstrap.hear(2, 0, nullptr, 0);
    });
    for (const Status& error : errors) {
        CHECK_EQ(error.code, DDL_ERROR_MEMORY);
        CHECK_EQ(error.message, std::string("rank 2 has no room"));
    }
}

TEST("where one rank is out of memory, the others are told") {
    LocalNetwork network(3);
    BootstrapOptions options = talk_options();
    options.patience = {1, 2, 4};
    const auto ends = talk(
        network,
        [](Bootstrap& bootstrap) {
            if (bootstrap.rank() == 2) throw std::bad_alloc();
            bootstrap.hear(2, 0, nullptr, 0);
        },
        options);
    for (const Status& end : ends) CHECK_EQ(end.code, DDL_ERROR_MEMORY);
    CHECK_EQ(ends[0].message, std::string("the test: rank 2 is out of memory"));
    CHECK_EQ(ends[1].message, ends[0].message);
}

TEST("what the engine of a rank that is further says meanwhile is for this rank's engine") {
    LocalNetwork network(2);
    std::unique_ptr<Transport> transport = network.transport(0);
    EngineOptions options = test_options();
    {
        NoticeContent goodbye;
        goodbye.kind = NoticeKind::goodbye;
        send_notice(*network.transport(1), {0}, goodbye);
        Bootstrap bootstrap(*transport, talk_options());
        int looks = 0;
        bootstrap.await(1, [&] { return ++looks > 2; });
        options.early = bootstrap.take_foreign();
    }
    CHECK_EQ(options.early.size(), size_t{1});
    Engine engine(std::move(transport), flat_plan(2), options);
    const double begin = seconds_now();
    const Status status = engine.run(kWorld, {{Collective::barrier, DDL_UINT8, DDL_SUM, 0, 0}, nullptr, nullptr});
    CHECK_EQ(status.code, DDL_ERROR_SHUTDOWN);
    CHECK_CONTAINS(status.message, "rank 1 has finalized without calling it");
    CHECK(seconds_now() - begin < 10);
}

TEST("a rank that is dead is named, whomever one waits for") {
    LocalNetwork network(3);
    network.kill(1);
    const auto errors = talk(network, [](Bootstrap& bootstrap) {
        if (bootstrap.rank() != 1) bootstrap.hear(2 - bootstrap.rank(), 0, nullptr, 0);
    });
    CHECK_EQ(errors[0].code, DDL_ERROR_PEER_LOST);
    CHECK_EQ(errors[0].message, std::string("the test: rank 1 (host b) died"));
    CHECK_EQ(errors[2].message, errors[0].message);
}

TEST("a rank that stays silent is named in a warning, then in an error") {
    std::mutex mutex;
    std::set<std::string> warnings;
    BootstrapOptions options = talk_options();
    options.patience = {1, 0.1, 0.6};
    options.warn = [&](const std::string& text) {
        const std::lock_guard lock(mutex);
        warnings.insert(text);
    };
    LocalNetwork network(2);
    network.silence(1);
    const auto errors =
        talk(network, [](Bootstrap& bootstrap) { bootstrap.hear(1 - bootstrap.rank(), 0, nullptr, 0); }, options);
    for (const int rank : {0, 1}) {
        const Status& error = errors[static_cast<size_t>(rank)];
        const std::string other = rank == 0 ? "rank 1 (host b)" : "rank 0 (host a)";
        CHECK_EQ(error.code, DDL_ERROR_TIMEOUT);
        CHECK_CONTAINS(error.message, " s for " + other);
        CHECK_CONTAINS(error.message, "DDL_TIMEOUT");
    }
    CHECK_EQ(warnings.size(), size_t{2});
    for (const std::string& text : warnings) CHECK_CONTAINS(text, " s for rank");
}
