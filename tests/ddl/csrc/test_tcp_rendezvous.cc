// Ranks that are threads of one process meet over TCP, through a store that is a map.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/backoff.h"
#include "base/status.h"
#include "check.h"
#include "startup/survivors.h"
#include "startup/tcp_rendezvous.h"
#include "store.h"
#include "transport/bootstrap.h"

using namespace ddl;

namespace check {
int ranks();  // that --ranks asks for; 0: none
}

namespace {

using Transports = std::vector<std::unique_ptr<TcpTransport>>;

// The transport of each rank after meet().
Transports meet_all(Store& store, int size) {
    Transports all(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                all[static_cast<size_t>(rank)] = std::make_unique<TcpTransport>(
                    rank, meet(store.member(rank, size), 0, 60, [](const std::string&) {}), nullptr);
            } catch (const std::exception& error) {
                check::failed(__FILE__, __LINE__, error.what());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return all;
}

void poll_all(const Transports& all) {
    for (const auto& one : all) one->poll();
}

size_t count_connections(const Transports& all) {
    size_t ends = 0;
    for (const auto& one : all) ends += one ? one->connections() : 0;
    return ends / 2;
}

// Every rank sends its number to every other one at this distance, at once; true if all arrive.
bool exchange_all(const Transports& all, const std::vector<int>& distances) {
    const int size = static_cast<int>(all.size());
    std::vector<int32_t> numbers(all.size());
    std::vector<std::pair<int, Ticket>> open;
    std::deque<int32_t> arrived;
    std::vector<int> expected;
    for (int rank = 0; rank < size; ++rank) {
        numbers[static_cast<size_t>(rank)] = rank;
        for (const int distance : distances) {
            const int from = (rank + size - distance) % size;
            arrived.push_back(-1);
            expected.push_back(from);
            Transport& its = *all[static_cast<size_t>(rank)];
            open.emplace_back(rank, its.irecv(from, 1, &arrived.back(), sizeof(int32_t)));
            open.emplace_back(
                rank, its.isend((rank + distance) % size, 1, &numbers[static_cast<size_t>(rank)], sizeof(int32_t)));
        }
    }
    const double deadline = seconds_now() + 20;
    while (!open.empty() && seconds_now() < deadline) {
        poll_all(all);
        const auto is_over = [&](const auto& one) {
            size_t received = 0;
            return all[static_cast<size_t>(one.first)]->test(one.second, &received) != Progress::pending;
        };
        open.erase(std::remove_if(open.begin(), open.end(), is_over), open.end());
    }
    return open.empty() && std::equal(arrived.begin(), arrived.end(), expected.begin(), expected.end());
}

}  // namespace

TEST("ranks that meet connect to rank 0 alone, and ask the store as often as there are ranks") {
    const int size = check::kSanitized ? 12 : 48;
    Store store;
    const Transports all = meet_all(store, size);
    CHECK_EQ(store.sets, 1);
    CHECK_EQ(store.gets, size - 1);
    CHECK_EQ(count_connections(all), static_cast<size_t>(size - 1));
    CHECK(exchange_all(all, {1}));
    CHECK(exchange_all(all, {1}));
    CHECK_EQ(count_connections(all), static_cast<size_t>(2 * size - 3));  // two of the ring's are rank 0's
}

TEST("a pair that begins to connect from both ends at once has one connection, and no message is lost") {
    for (int round = 0; round < 20; ++round) {
        Store store;
        const Transports all = meet_all(store, 6);
        CHECK(exchange_all(all, {1, 2, 3, 4, 5}));
        CHECK_EQ(count_connections(all), size_t{15});
        CHECK(exchange_all(all, {1, 2, 3, 4, 5}));
    }
}

TEST("what is told to many ranks reaches each once, over few connections") {
    const int size = 30;
    Store store;
    const Transports all = meet_all(store, size);
    std::vector<int> everyone;
    for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
    for (int32_t from = 1; from < size; ++from) all[static_cast<size_t>(from)]->tell(everyone, &from, sizeof from);
    std::vector<std::vector<int>> heard(static_cast<size_t>(size));
    const double deadline = seconds_now() + 20;
    for (size_t count = 0; count < 29 * 29 && seconds_now() < deadline;) {
        poll_all(all);
        for (size_t rank = 0; rank < heard.size(); ++rank) {
            for (Notice notice; all[rank]->next_notice(&notice); ++count) {
                int32_t from = -1;
                CHECK_EQ(notice.content.size(), sizeof from);
                std::memcpy(&from, notice.content.data(), sizeof from);
                CHECK_EQ(from, notice.from);
                heard[rank].push_back(from);
            }
        }
    }
    for (int rank = 0; rank < size; ++rank) {
        std::vector<int>& its = heard[static_cast<size_t>(rank)];
        std::sort(its.begin(), its.end());
        std::vector<int> expected;
        for (int from = 1; from < size; ++from) {
            if (from != rank) expected.push_back(from);
        }
        CHECK(its == expected);
    }
    CHECK(count_connections(all) < 30 * 29 / 2);
}

TEST("a rank that has closed is known to have left by those that try to reach it") {
    Store store;
    Transports all = meet_all(store, 3);
    all[1]->close();
    const int32_t word = 1;
    const Ticket ticket = all[2]->isend(1, 0, &word, sizeof word);
    CHECK(!all[2]->has_left(1));
    const double deadline = seconds_now() + 20;
    while (!all[2]->has_left(1) && seconds_now() < deadline) poll_all(all);
    CHECK(all[2]->has_left(1));
    CHECK(!all[2]->is_dead(1));
    CHECK(all[2]->cancel(ticket));
}

TEST("a first message arrives though its sender closes at once, and so does its goodbye") {
    for (int round = 0; round < 20; ++round) {
        Store store;
        Transports all = meet_all(store, 3);
        const int32_t out = 42;
        int32_t in = 0;
        const Ticket receive = all[2]->irecv(1, 3, &in, sizeof in);
        all[1]->isend(2, 3, &out, sizeof out);
        if (round % 2 == 1) all[2]->isend(1, 3, &out, sizeof out);  // both begin to connect
        std::thread leaver([&] { all[1]->close(); });
        const double deadline = seconds_now() + 20;
        size_t received = 0;
        while (all[2]->test(receive, &received) == Progress::pending && seconds_now() < deadline) all[2]->poll();
        CHECK_EQ(in, out);
        while (!all[2]->is_gone(1) && seconds_now() < deadline) all[2]->poll();
        CHECK(all[2]->is_gone(1) && !all[2]->is_dead(1));
        leaver.join();
    }
}

TEST("ranks that leave while they pass on what others tell are not taken for dead") {
    for (int round = 0; round < 10; ++round) {
        const int size = 24;
        Store store;
        const Transports all = meet_all(store, size);
        std::vector<int> everyone;
        for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
        std::vector<std::thread> threads;
        for (const auto& its : all) {
            threads.emplace_back([&] {
                its->tell(everyone, "bye", 3);
                const double until = seconds_now() + its->rank() * 1e-3;
                while (seconds_now() < until) its->poll();
                its->close();
            });
        }
        for (std::thread& thread : threads) thread.join();
        for (const auto& its : all) {
            for (const int other : everyone) CHECK(!its->is_dead(other));
        }
    }
}

TEST("a rank that waits for one that has left learns so, though nothing ever passed between them") {
    Store store;
    Transports all = meet_all(store, 3);
    BootstrapOptions options;
    options.what = "test";
    Bootstrap bootstrap(*all[2], options);
    std::thread other([&] {
        all[1]->close();
        for (int i = 0; i < 1000; ++i) {  // rank 0 answers
            all[0]->poll();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    });
    char byte = 0;
    const double begin = seconds_now();
    CHECK_CONTAINS(check::message_of<Error>([&] { bootstrap.hear(1, 3, &byte, 1); }), "test: rank 1 left");
    CHECK(seconds_now() - begin < 20);
    other.join();
}

namespace {

// A host that drops what comes: its queue is full.
struct SilentHost {
    explicit SilentHost(bool is_near = true) : is_near(is_near) {
        CHECK_EQ(listen(socket.fd(), 0), 0);
        for (int i = 0; i < 4; ++i) queue.push_back(connect_to(address, port));
    }
    // Where it is, for `other`: on the same host, or on another one.
    std::string contact(const Connector& other) const {
        const std::string space = other.contact().substr(0, other.contact().find(' '));
        return (is_near ? space : "elsewhere") + " " + address + " " + std::to_string(port) + " ";
    }
    const bool is_near;
    const std::string address = is_near ? kLoopbackAddress : "127.0.0.2";  // no rank of this host listens there
    uint16_t port = 0;
    const Socket socket = listen_at(address, &port);
    std::vector<Socket> queue;
};

// Knows the token, and has its own contact where the silent one's are not.
std::shared_ptr<Connector> among_silent(int rank, int size, const SilentHost& silent) {
    auto made = std::make_shared<Connector>(rank, size);
    made->set_token("token");
    made->let_in();
    std::vector<std::string> contacts(static_cast<size_t>(size), silent.contact(*made));
    contacts[static_cast<size_t>(rank)] = made->contact();
    made->know(std::move(contacts));
    return made;
}

}  // namespace

TEST("a rank that can be reached is, though many that do not answer come before it") {
    constexpr int kSize = 101;
    const SilentHost silent;
    const auto first = among_silent(0, kSize, silent), last = among_silent(kSize - 1, kSize, silent);
    std::vector<std::string> contacts(kSize, silent.contact(*first));
    contacts.back() = last->contact();
    first->know(std::move(contacts));
    for (int rank = 1; rank < kSize; ++rank) first->want(rank);
    const double deadline = seconds_now() + 20;
    while (!first->is_connected(kSize - 1) && seconds_now() < deadline) {
        first->serve(1);
        last->serve(1);
    }
    CHECK(first->is_connected(kSize - 1) && last->is_connected(0));
}

TEST("a rank that accepts and says nothing is there, and so is one for whom descriptors are missing") {
    uint16_t port = 0;
    const Socket stopped = listen_at("127.0.0.1", &port);
    const SilentHost silent;
    for (const bool is_short : {false, true}) {
        const auto connector = among_silent(0, 3, silent);
        const std::string contact = silent.contact(*connector);
        const std::string space = contact.substr(0, contact.find(' ') + 1);
        connector->know({connector->contact(), space + "127.0.0.1 " + std::to_string(port) + " ", contact});
        rlimit limit{}, none{};
        getrlimit(RLIMIT_NOFILE, &limit);
        none = limit;
        none.rlim_cur = 3;  // for new ones
        if (is_short) setrlimit(RLIMIT_NOFILE, &none);
        connector->want(1);
        connector->want(2);
        const auto serve = [&](double seconds) {
            for (const double until = seconds_now() + seconds; seconds_now() < until;) connector->serve(1);
        };
        serve(1.2);
        setrlimit(RLIMIT_NOFILE, &limit);
        CHECK(!connector->is_unanswered(1));
        CHECK_EQ(connector->is_unanswered(2), !is_short);
    }
}

TEST("in a cut network a rank of this host is not taken for gone if it does not answer, and one of another host is") {
    if (check::kSanitized) return;  // it takes 5 seconds
    const SilentHost near, far(false);
    const auto connector = among_silent(0, 3, near);
    connector->know({connector->contact(), near.contact(*connector), far.contact(*connector)});
    connector->expect_cut();
    connector->want(1);
    connector->want(2);
    Connector::News news;
    const double deadline = seconds_now() + 60;
    while (news.peer < 0 && seconds_now() < deadline) {
        connector->serve(10);
        connector->next(&news);
    }
    CHECK(news.peer == 2 && news.kind == Connector::News::unreachable);
    for (const double until = seconds_now() + 1; seconds_now() < until;) connector->serve(10);
    CHECK(!connector->next(&news));
}

TEST("ranks that were cut off learn so in seconds, though heartbeats know of one alone that it is silent") {
    if (check::kSanitized) return;  // it takes 7 seconds
    constexpr int kSize = 40;
    const SilentHost silent(false);
    TcpLinks links;
    links.ranks.resize(kSize);
    for (int rank = 0; rank < kSize; ++rank) links.numbers.push_back(rank);
    links.connector = among_silent(30, kSize, silent);
    TcpTransport transport(30, std::move(links), nullptr);
    SurvivorOptions options;
    options.death_of = [](int rank) { return rank == 29 ? Death::silent : Death::none; };
    options.warn = [](const std::string& text) { std::printf("%s\n", text.c_str()); };
    const double begin = seconds_now();
    CHECK_CONTAINS(check::message_of<Error>([&] { agree_on_survivors(transport, options); }),
                   "was cut off from the job: 39 of its 40 ranks do not answer");
    CHECK(seconds_now() - begin < 20);
}

TEST("ranks of this host at whose addresses nobody listens have ended: the last one goes on alone") {
    if (check::kSanitized) return;  // it takes 7 seconds
    constexpr int kSize = 4;
    uint16_t port = 0;
    listen_at(kLoopbackAddress, &port).close();
    TcpLinks links;
    links.ranks.resize(kSize);
    links.numbers = {0, 1, 2, 3};
    links.connector = std::make_shared<Connector>(0, kSize);
    const std::string own = links.connector->contact();
    const std::string other = own.substr(0, own.find(' ') + 1) + kLoopbackAddress + " " + std::to_string(port) + " ";
    links.connector->know({own, other, other, other});
    TcpTransport transport(0, std::move(links), nullptr);
    SurvivorOptions options;
    options.death_of = [](int) { return Death::none; };
    options.warn = [](const std::string& text) { std::printf("%s\n", text.c_str()); };
    CHECK(agree_on_survivors(transport, options).ranks == std::vector<int>{0});
}

TEST("of two ranks that want each other the lower one connects, if the other does not come through") {
    Connector lower(0, 2), higher(1, 2);
    for (Connector* one : {&lower, &higher}) {
        one->set_token("token");
        one->let_in();
    }
    const SilentHost silent;
    higher.know({silent.contact(higher), higher.contact()});
    lower.know({lower.contact(), higher.contact()});
    higher.want(0);
    lower.want(1);
    const double begin = seconds_now();
    while (!lower.is_connected(1) && seconds_now() - begin < 20) {
        higher.serve(1);
        lower.serve(1);
    }
    CHECK(lower.is_connected(1) && higher.is_connected(0));
    CHECK(seconds_now() - begin < 2);  // and not when the attempt is given up
}

TEST("a rank that is still in the last epoch gets its farewell from one that it has no connection to") {
    Store store;
    Transports all = meet_all(store, 4);
    // 1 and 2 have ended the epoch, which 3 does not know yet.
    const std::vector<std::byte> farewell(9, std::byte{7});
    TcpLinks links = all[1]->end_epoch({1, 2, 3}, farewell);
    all[1] = std::make_unique<TcpTransport>(0, std::move(links), nullptr);
    all[3]->say(1, {std::byte{1}});
    int from = -1;
    std::vector<std::byte> word;
    const double deadline = seconds_now() + 20;
    while (!all[3]->next_word(&from, &word) && seconds_now() < deadline) poll_all(all);
    CHECK_EQ(from, 1);
    CHECK(word == farewell);
    // And then a message of the next epoch, whoever is in it first.
    const int32_t out = 42;
    int32_t in = 0;
    const Ticket send = all[1]->isend(2, 5, &out, sizeof out);
    for (int i = 0; i < 100; ++i) poll_all(all);
    links = all[3]->end_epoch({1, 2, 3}, farewell);
    all[3] = std::make_unique<TcpTransport>(2, std::move(links), nullptr);
    const Ticket receive = all[3]->irecv(0, 5, &in, sizeof in);
    size_t received = 0;
    while (all[3]->test(receive, &received) == Progress::pending && seconds_now() < deadline) poll_all(all);
    CHECK_EQ(in, 42);
    CHECK(all[1]->test(send, &received) == Progress::done);
    // A connection that is wanted in an epoch to come waits for it, and does not keep the other end from asking.
    const Ticket next = all[1]->isend(1, 5, &out, sizeof out);
    for (int i = 0; i < 300; ++i) {
        poll_all(all);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    all[2]->say(1, {std::byte{1}});
    while (!all[2]->next_word(&from, &word) && seconds_now() < deadline) poll_all(all);
    CHECK_EQ(from, 1);
    CHECK(word == farewell);
    links = all[2]->end_epoch({1, 2, 3}, farewell);
    all[2] = std::make_unique<TcpTransport>(1, std::move(links), nullptr);
    in = 0;
    const Ticket last = all[2]->irecv(0, 5, &in, sizeof in);
    while (all[2]->test(last, &received) == Progress::pending && seconds_now() < deadline) poll_all(all);
    CHECK_EQ(in, 42);
    CHECK(all[1]->test(next, &received) == Progress::done);
}

TEST("a living rank that the others leave out learns so from whomever it asks, and takes nobody for gone") {
    for (const bool has_connection : {false, true}) {
        Store store;
        Transports all = meet_all(store, 4);
        if (has_connection) CHECK(exchange_all(all, {1, 2, 3}));
        // 1 and 2 go on without 3, and then once more: it is two epochs behind.
        const std::vector<std::byte> farewell(9, std::byte{7}), next(9, std::byte{8});
        TcpLinks links = all[1]->end_epoch({1, 2}, farewell);
        all[1] = std::make_unique<TcpTransport>(0, std::move(links), nullptr);
        links = all[1]->end_epoch({0, 1}, next);
        all[1] = std::make_unique<TcpTransport>(0, std::move(links), nullptr);
        all[3]->say(1, {std::byte{1}});
        int from = -1;
        std::vector<std::byte> word;
        const double deadline = seconds_now() + 20;
        while (!all[3]->next_word(&from, &word) && seconds_now() < deadline) poll_all(all);
        CHECK_EQ(from, 1);
        CHECK(word == farewell);
        CHECK(!all[3]->is_gone(1) && !all[3]->is_dead(1));
    }
}

TEST("who closes a connection before it says anything has not said goodbye") {
    Connector other(0, 2);
    other.set_token("token");
    other.let_in();
    TcpLinks links;
    links.ranks.resize(2);
    links.numbers = {0, 1};
    links.connector = std::make_shared<Connector>(1, 2);
    links.connector->set_token("token");
    links.connector->know({other.contact(), links.connector->contact()});
    TcpTransport transport(1, std::move(links), nullptr);
    transport.say(0, {std::byte{1}});
    const double deadline = seconds_now() + 20;
    while (transport.seconds_lost(0) == 0 && !transport.is_gone(0) && seconds_now() < deadline) {
        transport.poll();
        other.serve(1);
        for (Connector::News news; other.next(&news);) news.socket.close();
    }
    CHECK(!transport.is_gone(0) && !transport.is_dead(0));
    CHECK(transport.seconds_lost(0) != 0);  // negative as long as heartbeats may say why
}

TEST("ranks that find the address of a job before theirs in the store ask again") {
    Store store;
    // Nobody listens there, or somebody does who is no rank: a listener that answers nothing.
    uint16_t port = 0;
    const Socket silent = listen_at("127.0.0.1", &port);
    Transports all(2);
    store.values["ddl/rendezvous/0"] = "old ? 127.0.0.1 1 127.0.0.1 " + std::to_string(port) + " ";
    std::thread second([&] {
        all[1] = std::make_unique<TcpTransport>(1, meet(store.member(1, 2), 0, 60, [](const std::string&) {}), nullptr);
    });
    for (bool waits = true; waits;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        const std::lock_guard lock(store.mutex);
        waits = store.gets == 0;
    }
    all[0] = std::make_unique<TcpTransport>(0, meet(store.member(0, 2), 0, 60, [](const std::string&) {}), nullptr);
    second.join();
    CHECK(exchange_all(all, {1}));
    CHECK(store.gets > 1);
}

namespace {

// What meet() ends with on one rank; "" if it succeeds.
std::string end_of_meeting(Store& store, int rank, int size, double timeout) {
    return check::message_of<Error>([&] { meet(store.member(rank, size), 0, timeout, [](const std::string&) {}); });
}

}  // namespace

TEST("ranks of different sizes learn both sizes, though one that rank 0 waits for never comes") {
    for (const int size : {2, 3}) {
        Store store;
        std::string said[2];
        std::thread second([&] { said[1] = end_of_meeting(store, 1, 5 - size, 60); });
        said[0] = end_of_meeting(store, 0, size, 60);
        second.join();
        for (const std::string& one : said) {
            CHECK_EQ(one, "ddl_init: rank 0 is one of " + std::to_string(size) + " ranks, but rank 1 is one of " +
                              std::to_string(5 - size) + ": start all with the same size (WORLD_SIZE)");
        }
    }
}

TEST("a second process with a rank's number, and one beyond rank 0's size, learn that rank 0 does not take them") {
    Store store;
    const Transports all = meet_all(store, 2);
    for (const int rank : {1, 2}) {
        std::string said;
        std::atomic<bool> ended{false};
        std::thread other([&] {
            said = end_of_meeting(store, rank, 3, 1);
            ended = true;
        });
        while (!ended) poll_all(all);
        other.join();
        CHECK_CONTAINS(said, "for rank 0: it answers, but takes no rank " + std::to_string(rank) + " of 3 from here");
    }
}

namespace {

// Ranks as threads, each with a bootstrap over its transport.
template <typename Body>
void on_each(const Transports& all, Body body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < all.size(); ++rank) {
        if (!all[rank]) continue;
        threads.emplace_back([&, rank] {
            try {
                body(*all[rank]);
            } catch (const std::exception& error) {
                check::failed(__FILE__, __LINE__, error.what());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// A barrier, then a sum by recursive doubling, for which lowest ranks take the part of those beyond a power of two.
void meet_and_sum(TcpTransport& its) {
    BootstrapOptions options;
    options.spins = 0;
    Bootstrap bootstrap(its, options);
    std::vector<int> everyone(static_cast<size_t>(its.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    bootstrap.barrier(everyone, 1);
    int power = 1;
    while (2 * power <= its.size()) power *= 2;
    int64_t sum = its.rank(), part = 0;
    const auto with = [&](int peer, bool sends, bool receives) {
        Ticket in = 0;
        if (receives) in = bootstrap.expect(peer, 2, &part, sizeof part);
        if (sends) bootstrap.say(peer, 2, &sum, sizeof sum);
        if (receives) bootstrap.await(peer, [&] { return bootstrap.finished(in); });
    };
    if (its.rank() >= power) {
        with(its.rank() - power, true, true);
        sum = part;
    } else {
        const bool stands_for_two = its.rank() + power < its.size();
        if (stands_for_two) {
            with(its.rank() + power, false, true);
            sum += part;
        }
        for (int distance = 1; distance < power; distance *= 2) {
            with(its.rank() ^ distance, true, true);
            sum += part;
        }
        if (stands_for_two) with(its.rank() + power, true, false);
    }
    CHECK_EQ(sum, int64_t{its.size()} * (its.size() - 1) / 2);
}

}  // namespace

TEST("many ranks meet, sum and shrink with few connections, and one store operation each") {
    // 512 by `ddl_tests --ranks 512 "many ranks"`.
    const int size = check::ranks() > 0 ? check::ranks() : check::kSanitized ? 16 : 64;
    const int killed = size / 16;
    Store store;
    const double start = seconds_now();
    Transports all = meet_all(store, size);
    const auto report = [&](const char* what, double since) {
        const double took = seconds_now() - since;
        std::printf("     %s: %.2f s, %zu connections\n", what, took, count_connections(all));
    };
    CHECK_EQ(store.sets, 1);
    CHECK_EQ(store.gets, size - 1);
    CHECK_EQ(count_connections(all), static_cast<size_t>(size - 1));
    report("rendezvous", start);
    const double first = seconds_now();
    on_each(all, meet_and_sum);
    report("barrier and sum", first);
    int bits = 0;
    while (1 << bits < size) ++bits;
    CHECK(count_connections(all) <= static_cast<size_t>(size * (2 * bits + 1)));

    // The leader is one of those that die; most ranks have no connection to most of them.
    const auto is_killed = [&](int rank) { return rank % 16 == 0 && rank < 16 * killed; };
    Transports dead;
    for (int rank = 0; rank < size; rank += 16) {
        if (is_killed(rank)) dead.push_back(std::move(all[static_cast<size_t>(rank)]));
    }
    SurvivorOptions options;
    options.warn = [](const std::string& text) { std::printf("%s\n", text.c_str()); };
    options.death_of = [&](int rank) { return is_killed(rank) ? Death::ended : Death::none; };
    options.offer = [] { return std::string(); };  // nobody waits to join
    options.prepare = [](const std::string&, uint64_t* ready) {
        *ready = 0;
        return true;
    };
    const double death = seconds_now();
    Transports next(all.size());
    on_each(all, [&](TcpTransport& its) {
        Survivors survivors = agree_on_survivors(its, options);
        CHECK_EQ(static_cast<int>(survivors.ranks.size()), size - killed);
        const auto place = std::lower_bound(survivors.ranks.begin(), survivors.ranks.end(), its.rank());
        next[static_cast<size_t>(its.rank())] = std::make_unique<TcpTransport>(
            static_cast<int>(place - survivors.ranks.begin()), std::move(survivors.links), nullptr);
    });
    all = std::move(next);
    report("shrink", death);
    const double again = seconds_now();
    on_each(all, meet_and_sum);
    report("barrier and sum of the survivors", again);
    CHECK_EQ(store.sets + store.gets, size);
}
