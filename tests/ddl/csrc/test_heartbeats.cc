// Heartbeats between ranks that are objects of one process, over the loopback interface. A rank dies by being
// destroyed.
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "base/status.h"
#include "check.h"
#include "transport/heartbeats.h"
#include "transport/socket.h"

using namespace ddl;

namespace {

const std::string kToken = "token";

void ignore(int, Death) {}

// A contact's first word names the host.
Contact endpoints_of(const Heartbeats& rank) { return contact_of(rank.contact().substr(rank.contact().find(' ') + 1)); }

// The contact of a rank whose host is unknown. Two dead ends come first: a port without a listener, and no address.
std::string contact_at(uint16_t port) {
    return "? " + to_text({{"127.0.0.2", port}, {"nowhere", port}, {kLoopbackAddress, port}}, kMostContact);
}

void set_patience(int guest) {
    const timeval patience{20, 0};
    setsockopt(guest, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(guest, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

void knock(int guest, const Heartbeats& rank) {
    set_patience(guest);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(endpoints_of(rank)[0].port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(connect(guest, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
}

// A connection of a stranger to `rank`, who waits up to 20 s for what is said to him.
int guest_of(const Heartbeats& rank) {
    const int guest = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    knock(guest, rank);
    return guest;
}

// The next connection, likewise.
int accept_at(const Socket& listener) {
    pollfd wait{listener.fd(), POLLIN, 0};
    CHECK_EQ(poll(&wait, 1, 20000), 1);
    const int line = accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC);
    set_patience(line);
    return line;
}

bool is_shown_out(int guest) {
    char byte = 0;
    const ssize_t received = recv(guest, &byte, 1, 0);
    return received == 0 || (received < 0 && errno == ECONNRESET);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Ring {
    // `on_death` is called on the watching thread of a rank.
    explicit Ring(
        int size, const std::string& odd_token = kToken, std::function<void(int rank)> on_death = [](int) {}) {
        for (int rank = 0; rank < size; ++rank) {
            ranks.push_back(std::make_unique<Heartbeats>(rank, size));
            contacts.push_back(contact_at(endpoints_of(*ranks.back())[0].port));
        }
        std::vector<std::thread> threads;
        missing.resize(ranks.size());
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
            threads.emplace_back([&, rank] {
                const std::string& token = rank == 1 ? odd_token : kToken;
                const double patience = odd_token == kToken ? 20 : 0.3;
                missing[rank] = ranks[rank]->connect(
                    contacts, token, patience, [on_death, rank](int, Death) { on_death(static_cast<int>(rank)); });
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

    std::vector<std::unique_ptr<Heartbeats>> ranks;
    std::vector<std::string> contacts;
    std::vector<std::vector<int>> missing;
};

}  // namespace

TEST("peers are those at powers of two, and it is mutual") {
    CHECK(heartbeat_peers(0, 1).empty());
    CHECK(heartbeat_peers(0, 2) == std::vector<int>({1}));
    CHECK(heartbeat_peers(0, 10) == std::vector<int>({1, 2, 4, 6, 8, 9}));
    for (const int size : {2, 3, 7, 8, 100}) {
        for (int rank = 0; rank < size; ++rank) {
            for (const int peer : heartbeat_peers(rank, size)) {
                CHECK(peer != rank);
                const auto theirs = heartbeat_peers(peer, size);
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

TEST("a goodbye reaches a peer whose connection is not up here yet") {
    uint16_t port = 0;
    const Socket listener = listen_at(kLoopbackAddress, &port);
    auto first = std::make_unique<Heartbeats>(0, 2);
    Heartbeats second(1, 2);
    const std::vector<std::string> contacts = {first->contact(), contact_at(port)};
    std::thread connects([&] { CHECK(first->connect(contacts, kToken, 20, ignore).empty()); });
    CHECK(second.connect({first->contact(), second.contact()}, kToken, 0, ignore) == std::vector<int>({0}));
    // All that they say passes through the test's hands.
    const int line = accept_at(listener), guest = guest_of(second);
    const auto carry = [](int from, int to, size_t bytes) {
        std::string text(bytes, 0);
        CHECK_EQ(recv(from, text.data(), bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
        CHECK_EQ(send(to, text.data(), bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
        return text;
    };
    carry(line, guest, 40);  // hello
    carry(guest, line, 48);  // answer
    carry(line, guest, 32);  // proof
    char kept = 0;
    CHECK_EQ(recv(guest, &kept, 1, 0), ssize_t{1});
    const auto leaves = std::async(std::launch::async, [&] { first->say_goodbye(); });
    CHECK(leaves.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
    CHECK_EQ(send(line, &kept, 1, MSG_NOSIGNAL), ssize_t{1});
    const std::string frame = carry(line, guest, 12);
    CHECK_EQ(frame[0], char{1});  // a goodbye
    connects.join();
    leaves.wait();
    first.reset();
    CHECK(is_shown_out(line));
    close(guest);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!second.any_dead());
    close(line);
}

TEST("a rank that comes late is let in, but not by one that has said goodbye") {
    for (const bool leaves : {false, true}) {
        auto first = std::make_unique<Heartbeats>(0, 2);
        Heartbeats second(1, 2);
        const std::vector<std::string> contacts = {first->contact(), second.contact()};
        CHECK(second.connect(contacts, kToken, 0, ignore) == std::vector<int>({0}));
        if (leaves) second.say_goodbye();
        const std::vector<int> missing = first->connect(contacts, kToken, leaves ? 0.3 : 20, ignore);
        CHECK(missing == (leaves ? std::vector<int>({1}) : std::vector<int>()));
        CHECK(!first->any_dead());
        first.reset();
        for (int i = 0; i < 2000 && !leaves && !second.any_dead(); ++i) usleep(5000);
        CHECK_EQ(second.any_dead(), !leaves);
    }
}

TEST("another job's rank is not taken for one of this") {
    Ring ring(2, "another");
    CHECK(ring.missing[0] == std::vector<int>({1}));
    CHECK(ring.missing[1] == std::vector<int>({0}));
    ring.ranks[1].reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!ring.ranks[0]->any_dead());
}

TEST("where descriptors have run out, who connects waits, and the watching thread does not spin") {
    Heartbeats heartbeats(1, 2);
    CHECK(heartbeats.connect({"", heartbeats.contact()}, kToken, 0.01, {}) == std::vector<int>({0}));
    const int guest = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int next = dup(guest);  // the lowest that is free
    close(next);
    rlimit before{};
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit few = before;
    few.rlim_cur = static_cast<rlim_t>(next);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    knock(guest, heartbeats);
    const std::clock_t busy = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(static_cast<double>(std::clock() - busy) / CLOCKS_PER_SEC < 0.05);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    // It is listened to again: what it says is no hello, so that it is sent away.
    char nonsense[64] = {};
    CHECK_EQ(send(guest, nonsense, sizeof nonsense, MSG_NOSIGNAL), ssize_t{sizeof nonsense});
    CHECK(is_shown_out(guest));
    close(guest);
}

TEST("ranks of one host listen at its loopback address alone, once they know that they share it") {
    std::vector<std::unique_ptr<Heartbeats>> ranks;
    for (int rank = 0; rank < 2; ++rank) ranks.push_back(std::make_unique<Heartbeats>(rank, 2));
    const std::vector<std::string> contacts = {ranks[0]->contact(), ranks[1]->contact()};
    for (const auto& rank : ranks) {
        rank->connect(contacts, kToken, 0, ignore);
        const Contact contact = endpoints_of(*rank);
        CHECK_EQ(contact[0].address, std::string(kLoopbackAddress));
        for (size_t i = 1; i < contact.size(); ++i) {
            uint16_t port = contact[i].port;
            CHECK(listen_at(contact[i].address, &port));  // it is free
        }
    }
}

TEST("a stranger who says anything is shown out at its first bytes, and what he goes on to say is not kept") {
    Ring ring(2);
    const int guest = guest_of(*ring.ranks[0]);
    const std::vector<char> garbage(1 << 20, 'x');
    const auto start = std::chrono::steady_clock::now();
    // 488 MB were taken before the first byte was looked at. What fits into the kernel's own buffers may still go.
    size_t sent = 0;
    for (ssize_t count = 1; count > 0 && sent < (size_t{256} << 20); sent += static_cast<size_t>(count)) {
        count = send(guest, garbage.data(), garbage.size(), MSG_NOSIGNAL);
        if (count <= 0) break;
    }
    CHECK(sent < (size_t{32} << 20));
    CHECK(is_shown_out(guest));
    CHECK(seconds_since(start) < 4);  // and not only after the time that a silent one is given
    close(guest);
    ring.ranks[1].reset();
    CHECK(ring.all_know(1));
}

TEST("a stranger who says nothing, or stops in the midst of a hello, is shown out") {
    Ring ring(2);
    const int silent = guest_of(*ring.ranks[0]), slow = guest_of(*ring.ranks[0]);
    const uint64_t magic = 0x33706374206c6464;
    CHECK_EQ(send(slow, &magic, sizeof magic, MSG_NOSIGNAL), ssize_t{sizeof magic});
    CHECK(is_shown_out(silent));
    CHECK(is_shown_out(slow));
    close(silent);
    close(slow);
    ring.ranks[1].reset();
    CHECK(ring.all_know(1));
}

TEST("of many strangers only so many are kept, the newest, and ranks still find one another") {
    rlimit before{};
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    std::vector<std::unique_ptr<Heartbeats>> ranks;
    std::vector<std::string> contacts;
    for (int rank = 0; rank < 2; ++rank) {
        ranks.push_back(std::make_unique<Heartbeats>(rank, 2));
        contacts.push_back(ranks.back()->contact());
    }
    std::vector<int> guests;
    for (int i = 0; i < 200; ++i) guests.push_back(guest_of(*ranks[1]));  // who come before the rank that it waits for
    const auto start = std::chrono::steady_clock::now();
    std::vector<int> missing[2];
    std::thread waits([&] { missing[1] = ranks[1]->connect(contacts, kToken, 20, ignore); });
    missing[0] = ranks[0]->connect(contacts, kToken, 20, ignore);
    waits.join();
    CHECK(missing[0].empty() && missing[1].empty());
    CHECK(is_shown_out(guests[0]));
    CHECK(seconds_since(start) < 4);
    for (const int guest : guests) close(guest);
}

TEST("a rank that answers nobody is found by its peers, who tell the others") {
    constexpr int kSize = 12;
    // The watching thread of rank 6 stands still, as that of a process that is stopped.
    std::promise<void> stands, goes_on;
    std::once_flag once;
    Ring ring(kSize, kToken, [&](int rank) {
        if (rank != 6) return;
        std::call_once(once, [&] {
            stands.set_value();
            goes_on.get_future().wait();
        });
    });
    // All that have a watching thread, at once: on a busy machine an answer may take a while.
    const auto ask = [&] {
        std::vector<std::vector<int>> found(kSize);
        std::vector<std::thread> threads;
        for (int rank = 0; rank < kSize; ++rank) {
            if (rank == 6 || !ring.ranks[rank]) continue;
            threads.emplace_back([&, rank] { found[rank] = ring.ranks[rank]->silent(check::kSanitized ? 3 : 1); });
        }
        for (std::thread& thread : threads) thread.join();
        return found;
    };
    CHECK(ask() == std::vector<std::vector<int>>(kSize));
    ring.ranks[0].reset();
    stands.get_future().wait();
    std::vector<std::vector<int>> expected(kSize, {6});
    expected[0].clear();
    expected[6].clear();
    CHECK(ask() == expected);
    goes_on.set_value();
}
