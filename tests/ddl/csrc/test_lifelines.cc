// Lifelines between ranks that are objects of one process, over the loopback interface. A rank dies by being destroyed.
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <ctime>
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

TEST("while a rank forks, its lines stay as they are") {
    Ring ring(2);
    ring.ranks[0]->before_fork();
    ring.ranks[1].reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(ring.ranks[0]->death_of(1) == Death::none);
    ring.ranks[0]->after_fork();
    CHECK(ring.all_know(1));
}

TEST("where descriptors have run out, who connects waits, and the watching thread does not spin") {
    Lifelines lifelines;
    CHECK(lifelines.connect(1, {{{}, 0}, {{}, lifelines.port()}}, kToken, 0.01, {}) == std::vector<int>({0}));
    const int guest = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval patience{20, 0};
    setsockopt(guest, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(lifelines.port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int next = dup(guest);  // the lowest that is free
    close(next);
    rlimit before{};
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit few = before;
    few.rlim_cur = static_cast<rlim_t>(next);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    CHECK_EQ(connect(guest, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    const std::clock_t busy = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(static_cast<double>(std::clock() - busy) / CLOCKS_PER_SEC < 0.05);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    // It is listened to again: what it says is no hello, so that it is sent away.
    char nonsense[64] = {};
    CHECK_EQ(send(guest, nonsense, sizeof nonsense, MSG_NOSIGNAL), ssize_t{sizeof nonsense});
    const ssize_t received = recv(guest, nonsense, sizeof nonsense, 0);
    CHECK(received == 0 || (received < 0 && errno == ECONNRESET));
    close(guest);
}
