// Lifelines between ranks that are objects of one process, over the loopback interface. A rank dies by being destroyed.
#include <chrono>
#include <set>
#include <thread>

#include "check.h"
#include "lifelines.h"

using namespace ddl;

namespace {

constexpr uint64_t kToken = 0x1234;

struct Ring {
    explicit Ring(int size, uint64_t odd_token = kToken) {
        for (int rank = 0; rank < size; ++rank) {
            ranks.push_back(std::make_unique<Lifelines>());
            // A dead end comes first: a port that nobody listens on.
            contacts.push_back({{"127.0.0.2", "no address", "127.0.0.1"}, ranks.back()->port()});
        }
        std::vector<std::thread> threads;
        missing.resize(ranks.size());
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
            threads.emplace_back([this, rank, odd_token] {
                const uint64_t token = rank == 1 ? odd_token : kToken;
                missing[rank] = ranks[rank]->connect(static_cast<int>(rank), contacts, token,
                                                     odd_token == kToken ? 20 : 0.3, [](int, Death) {});
            });
        }
        for (std::thread& thread : threads) thread.join();
    }

    // True once every living rank knows that `rank` is dead.
    bool all_know(int rank) {
        for (int i = 0; i < 2000; ++i) {
            bool all = true;
            for (const auto& other : ranks) all = all && (!other || other->death_of(rank) == Death::ended);
            if (all) return true;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        return false;
    }

    std::vector<std::unique_ptr<Lifelines>> ranks;
    std::vector<Contact> contacts;
    std::vector<std::vector<int>> missing;
};

}  // namespace

TEST("peers are those at powers of two, and it is mutual") {
    CHECK(lifeline_peers(0, 1).empty());
    CHECK(lifeline_peers(0, 2) == std::vector<int>({1}));
    CHECK(lifeline_peers(0, 10) == std::vector<int>({1, 2, 4, 6, 8, 9}));
    for (const int size : {2, 3, 7, 8, 100}) {
        for (int rank = 0; rank < size; ++rank) {
            for (const int peer : lifeline_peers(rank, size)) {
                CHECK(peer != rank);
                const auto theirs = lifeline_peers(peer, size);
                CHECK(std::set<int>(theirs.begin(), theirs.end()).count(rank) == 1);
            }
        }
    }
}

TEST("a death is learnt by all, also by those who have no line to the dead") {
    for (const int size : {2, 3, 12}) {
        Ring ring(size);
        for (const auto& missing : ring.missing) CHECK(missing.empty());
        for (const auto& rank : ring.ranks) CHECK(!rank->any_dead());
        ring.ranks[1].reset();
        CHECK(ring.all_know(1));
        if (size < 12) continue;
        ring.ranks[0].reset();
        ring.ranks[2].reset();
        CHECK(ring.all_know(0));
        CHECK(ring.all_know(2));
        CHECK(ring.ranks[5]->death_of(6) == Death::none);
    }
}

TEST("who says goodbye is not dead") {
    Ring ring(3);
    ring.ranks[1]->say_goodbye();
    ring.ranks[1].reset();
    ring.ranks[2].reset();
    CHECK(ring.all_know(2));
    CHECK(ring.ranks[0]->death_of(1) == Death::none);
}

TEST("another job's rank is not taken for one of this") {
    Ring ring(2, kToken + 1);
    CHECK(ring.missing[0] == std::vector<int>({1}));
    CHECK(ring.missing[1] == std::vector<int>({0}));
    ring.ranks[1].reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!ring.ranks[0]->any_dead());
}
