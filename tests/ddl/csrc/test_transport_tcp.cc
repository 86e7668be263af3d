// TcpTransport over pairs of connected sockets, both ends in one thread.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "allocation.h"
#include "check.h"
#include "transport/transport_tcp.h"

using namespace ddl;

namespace {

// Of a rank of two, to the other.
TcpLinks link_to(size_t other, Socket socket) {
    TcpLinks links;
    links.ranks.resize(2);
    links.ranks[other].connection = std::make_unique<TcpConnection>();
    links.ranks[other].connection->open(std::move(socket));
    return links;
}

struct Pair {
    Pair() {
        int ends[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
        for (size_t rank = 0; rank < 2; ++rank) {
            its[rank] =
                std::make_unique<TcpTransport>(static_cast<int>(rank), link_to(1 - rank, Socket(ends[rank])), nullptr);
        }
    }
    // Until nothing can move any more.
    void settle() {
        for (int i = 0; i < 200; ++i) {
            its[0]->poll();
            its[1]->poll();
        }
    }
    std::unique_ptr<TcpTransport> its[2];
};

Progress test(Transport& transport, Ticket ticket, size_t* received = nullptr) {
    size_t bytes = 0;
    const Progress state = transport.test(ticket, &bytes);
    if (received) *received = bytes;
    return state;
}

std::vector<std::byte> message(std::mt19937& draw, size_t bytes) {
    std::vector<std::byte> data(bytes);
    for (auto& one : data) one = static_cast<std::byte>(draw());
    return data;
}

}  // namespace

TEST("over TCP, messages of a pair and a tag arrive whole and in order, whichever side is first") {
    for (unsigned seed = 0; seed < 10; ++seed) {
        std::mt19937 draw(seed);
        Pair pair;
        struct Sent {
            std::vector<std::byte> data;
            Ticket ticket;
            bool done = false;
        };
        struct Expected {
            std::vector<std::byte> data;
            Ticket ticket;
            bool done = false;
        };
        std::map<Tag, std::vector<Sent>> sent[2];          // by the sender
        std::map<Tag, std::vector<Expected>> expected[2];  // by the sender
        const size_t sizes[] = {0, 1, 100, 40000, kEagerBytes, kEagerBytes + 1, 200000};
        size_t sends = 0;
        const auto move_on = [&] {
            for (int from = 0; from < 2; ++from) {
                for (auto& [tag, list] : sent[from]) {
                    for (auto& one : list) one.done = one.done || test(*pair.its[from], one.ticket) == Progress::done;
                }
                for (auto& [tag, list] : expected[from]) {
                    for (size_t i = 0; i < list.size(); ++i) {
                        size_t received = 0;
                        if (list[i].done || test(*pair.its[1 - from], list[i].ticket, &received) == Progress::pending) {
                            continue;
                        }
                        list[i].done = true;
                        CHECK_EQ(received, sent[from][tag][i].data.size());
                        list[i].data.resize(received);
                        CHECK(list[i].data == sent[from][tag][i].data);
                    }
                }
            }
        };
        while (sends < 120) {
            const int from = static_cast<int>(draw() % 2);
            const Tag tag = draw() % 3;
            if (draw() % 2 == 0) {
                auto& list = sent[from][tag];
                list.push_back({message(draw, sizes[draw() % std::size(sizes)]), 0});
                list.back().ticket =
                    pair.its[from]->isend(1 - from, tag, list.back().data.data(), list.back().data.size());
                ++sends;
            } else {
                auto& list = expected[from][tag];
                list.push_back({std::vector<std::byte>(200000), 0});
                list.back().ticket = pair.its[1 - from]->irecv(from, tag, list.back().data.data(), 200000);
            }
            if (draw() % 4 == 0) pair.its[draw() % 2]->poll();
            move_on();
        }
        for (int from = 0; from < 2; ++from) {  // as many receives as sends, and as many sends as receives
            for (Tag tag = 0; tag < 3; ++tag) {
                auto& out = sent[from][tag];
                auto& in = expected[from][tag];
                while (in.size() < out.size()) {
                    in.push_back({std::vector<std::byte>(200000), 0});
                    in.back().ticket = pair.its[1 - from]->irecv(from, tag, in.back().data.data(), 200000);
                }
                while (out.size() < in.size()) {
                    out.push_back({message(draw, 50), 0});
                    out.back().ticket = pair.its[from]->isend(1 - from, tag, out.back().data.data(), 50);
                }
            }
        }
        for (int i = 0; i < 300; ++i) {
            pair.settle();
            move_on();
        }
        for (int from = 0; from < 2; ++from) {
            for (const auto& [tag, list] : sent[from]) {
                for (const auto& one : list) CHECK(one.done);
            }
            for (const auto& [tag, list] : expected[from]) {
                for (const auto& one : list) CHECK(one.done);
            }
        }
    }
}

TEST("over TCP, unexpected messages beyond the credit wait at the sender") {
    constexpr size_t kMessages = 100, kBytes = kEagerBytes;
    Pair pair;
    std::vector<std::byte> data(kBytes, std::byte{3});
    std::vector<Ticket> tickets;
    for (size_t i = 0; i < kMessages; ++i) tickets.push_back(pair.its[0]->isend(1, 5, data.data(), kBytes));
    pair.settle();
    size_t done = 0;
    for (auto& ticket : tickets) {
        if (test(*pair.its[0], ticket) == Progress::pending) continue;
        ticket = 0;
        ++done;
    }
    CHECK(done > 0);
    CHECK(done * kBytes <= kEagerWindow);
    for (size_t i = 0; i < kMessages; ++i) {
        std::vector<std::byte> in(kBytes);
        const Ticket receive = pair.its[1]->irecv(0, 5, in.data(), kBytes);
        Progress state = Progress::pending;
        for (int round = 0; round < 1000 && state == Progress::pending; ++round) {
            pair.its[0]->poll();
            pair.its[1]->poll();
            state = test(*pair.its[1], receive);
        }
        CHECK(state == Progress::done);
        CHECK(in == data);
    }
    pair.settle();
    for (const Ticket ticket : tickets) CHECK(ticket == 0 || test(*pair.its[0], ticket) == Progress::done);
}

TEST("over TCP, a message that is longer than its receive fails it and writes nothing") {
    for (const size_t bytes : {size_t{8}, size_t{100000}}) {
        for (const bool is_posted_first : {false, true}) {
            Pair pair;
            std::vector<std::byte> out(bytes, std::byte{1});
            int32_t in[2] = {};
            Ticket receive = 0;
            if (is_posted_first) receive = pair.its[1]->irecv(0, 0, in, sizeof in[0]);
            pair.its[0]->isend(1, 0, out.data(), bytes);
            pair.settle();
            if (!is_posted_first) receive = pair.its[1]->irecv(0, 0, in, sizeof in[0]);
            pair.settle();
            CHECK(test(*pair.its[1], receive) == Progress::failed);
            CHECK_EQ(in[0], 0);
            CHECK(!pair.its[1]->is_dead(0));
        }
    }
}

TEST("over TCP, memory is the caller's again when its message was cancelled, in whatever state") {
    for (unsigned seed = 0; seed < 60; ++seed) {
        std::mt19937 draw(seed);
        Pair pair;
        constexpr size_t kBytes = 1 << 20;  // more than the sockets hold
        auto out = std::make_unique<std::vector<std::byte>>(kBytes, std::byte{7});
        auto in = std::make_unique<std::vector<std::byte>>(kBytes);
        const Ticket send = pair.its[0]->isend(1, 0, out->data(), kBytes);
        const Ticket receive = pair.its[1]->irecv(0, 0, in->data(), kBytes);
        for (unsigned i = draw() % 8; i > 0; --i) pair.its[draw() % 2]->poll();
        const bool cancels_send = draw() % 2 == 0;
        if (cancels_send) {
            if (test(*pair.its[0], send) == Progress::pending) CHECK(pair.its[0]->cancel(send));
            out.reset();  // AddressSanitizer sees a later read
        } else {
            if (test(*pair.its[1], receive) == Progress::pending) CHECK(pair.its[1]->cancel(receive));
            in.reset();
        }
        pair.settle();
        // The connection goes on.
        int32_t word = 42, heard = 0;
        const Ticket last = pair.its[1]->irecv(0, 9, &heard, sizeof heard);
        pair.its[0]->isend(1, 9, &word, sizeof word);
        for (int i = 0; i < 20; ++i) pair.settle();
        CHECK(test(*pair.its[1], last) == Progress::done);
        CHECK_EQ(heard, 42);
    }
}

TEST("over TCP, a message that was announced and taken back is not awaited by a later receive") {
    constexpr size_t kBytes = kEagerBytes + 1;
    // The receive is posted before the announcement comes, between it and the end, or after that.
    for (const int moment : {0, 1, 2}) {
        Pair pair;
        const std::vector<std::byte> first(kBytes, std::byte{1}), second(kBytes, std::byte{2});
        std::vector<std::byte> in(kBytes);
        Ticket receive = 0;
        const auto post = [&](int now) {
            if (moment == now) receive = pair.its[1]->irecv(0, 4, in.data(), in.size());
        };
        post(0);
        const Ticket taken_back = pair.its[0]->isend(1, 4, first.data(), kBytes);
        pair.its[1]->poll();  // and asks for it, if it is awaited
        post(1);
        CHECK(pair.its[0]->cancel(taken_back));
        pair.settle();
        post(2);
        pair.settle();
        CHECK(test(*pair.its[1], receive) == Progress::pending);
        const Ticket send = pair.its[0]->isend(1, 4, second.data(), kBytes);
        for (int i = 0; i < 10; ++i) pair.settle();
        CHECK(test(*pair.its[1], receive) == Progress::done);
        CHECK(in == second);
        CHECK(test(*pair.its[0], send) == Progress::done);
    }
}

TEST("over TCP, what there was no memory for is taken when there is, with no traffic in between") {
    for (int64_t after = 0;; ++after) {
        Pair pair;
        const std::vector<std::byte> out(1000, std::byte{5});
        const std::vector<std::byte> longer(kEagerBytes + 1, std::byte{6});
        pair.its[0]->isend(1, 1, out.data(), out.size());
        pair.its[0]->notify(1, "hello", 5);
        pair.its[0]->isend(1, 2, longer.data(), longer.size());
        fail_allocations(after, 1);
        pair.its[1]->poll();  // reads all of it at once
        const bool failed = stop_failing();
        pair.its[1]->poll();
        Notice notice;
        CHECK(pair.its[1]->next_notice(&notice));
        std::vector<std::byte> in(1000), rest(longer.size());
        const Ticket first = pair.its[1]->irecv(0, 1, in.data(), in.size());
        CHECK(test(*pair.its[1], first) == Progress::done);
        const Ticket last = pair.its[1]->irecv(0, 2, rest.data(), rest.size());
        pair.settle();
        CHECK(test(*pair.its[1], last) == Progress::done);
        CHECK(in == out);
        CHECK(rest == longer);
        if (!failed) break;
    }
}

TEST("over TCP, a peer that sends no frame of ours is lost and nothing else") {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    const Socket stranger(ends[1]);
    TcpTransport transport(0, link_to(1, Socket(ends[0])), nullptr);
    const std::vector<char> garbage(1000, 'x');
    CHECK_EQ(write(stranger.fd(), garbage.data(), garbage.size()), ssize_t{1000});
    CHECK(!transport.is_dead(1));
    transport.poll();
    CHECK(transport.is_dead(1));
}

TEST("over TCP, a rank that reads nothing for longer than the kernel waits for the dead is alive") {
    if (check::kSanitized) return;  // it takes 8 seconds
    uint16_t port = 0;
    const Socket listener = listen_at("127.0.0.1", &port);
    Socket ends[2] = {connect_to("127.0.0.1", port), {}};
    for (int i = 0; i < 1000 && !ends[1]; ++i) {
        ends[1] = accept_from(listener);
        usleep(1000);
    }
    TcpTransport sender(0, link_to(1, std::move(ends[0])), nullptr);
    TcpTransport receiver(1, link_to(0, std::move(ends[1])), nullptr);
    constexpr size_t kBytes = 64 << 20;  // more than the sockets hold
    const std::vector<std::byte> out(kBytes, std::byte{9});
    std::vector<std::byte> in(kBytes);
    const Ticket receive = receiver.irecv(0, 0, in.data(), kBytes);
    const Ticket send = sender.isend(1, 0, out.data(), kBytes);
    while (!receiver.wait(1)) receiver.poll();
    receiver.poll();  // asks for it
    for (int i = 0; i < 80; ++i) {
        sender.poll();
        usleep(100000);
    }
    CHECK(!sender.is_dead(1));
    Progress state = Progress::pending;
    for (int i = 0; i < 100000 && state == Progress::pending; ++i) {
        sender.poll();
        receiver.poll();
        state = test(receiver, receive);
    }
    CHECK(state == Progress::done);
    CHECK(in == out);
    CHECK(test(sender, send) == Progress::done);
}

TEST("over TCP, notices arrive with their sender and content, and a goodbye is no death") {
    Pair pair;
    pair.its[0]->notify(1, "hello", 5);
    pair.settle();
    Notice notice;
    CHECK(pair.its[1]->next_notice(&notice));
    CHECK_EQ(notice.from, 0);
    CHECK_EQ(std::string(reinterpret_cast<const char*>(notice.content.data()), notice.content.size()),
             std::string("hello"));
    pair.its[0]->close();
    pair.settle();
    CHECK(!pair.its[1]->is_dead(0));
    pair.its[1].reset();
}

TEST("over TCP, connections go over to the next epoch, whose messages are its own, whatever was under way") {
    for (unsigned seed = 0; seed < 100; ++seed) {
        std::mt19937 draw(seed);
        Pair pair;
        constexpr size_t kLong = 1 << 20;  // more than the sockets hold
        std::vector<std::byte> old(kLong, std::byte{1}), into(kLong);
        std::vector<Ticket> sends, receives;
        for (const size_t bytes : {kLong, size_t{100}, size_t{0}, kLong}) {
            sends.push_back(pair.its[0]->isend(1, 3, old.data(), bytes));
            if (draw() % 2 == 0) receives.push_back(pair.its[1]->irecv(0, 3, into.data(), kLong));
            for (unsigned i = draw() % 4; i > 0; --i) pair.its[draw() % 2]->poll();
        }
        for (const Ticket ticket : sends) pair.its[0]->cancel(ticket);
        for (const Ticket ticket : receives) pair.its[1]->cancel(ticket);
        const std::vector<std::byte> word(300, std::byte{9});
        pair.its[0]->say(1, word);
        std::unique_ptr<TcpTransport> next[2];
        std::vector<std::byte> fresh = message(draw, 5000), got(5000);
        const std::vector<std::byte> farewell(7, std::byte{4});
        const auto renew = [&](size_t rank) {
            TcpLinks links = pair.its[rank]->end_epoch({0, 1}, farewell);
            CHECK(links.ranks[1 - rank].connection && !links.ranks[rank].connection);
            next[rank] = std::make_unique<TcpTransport>(static_cast<int>(rank), std::move(links), nullptr);
        };
        // The first is in its next epoch, and sends there, before the other has left this one.
        for (unsigned i = draw() % 4; i > 0; --i) pair.its[draw() % 2]->poll();
        renew(0);
        next[0]->isend(1, 3, fresh.data(), fresh.size());
        for (int i = 0; i < 100; ++i) {
            next[0]->poll();
            pair.its[1]->poll();
        }
        renew(1);
        int from = -1;
        std::vector<std::byte> heard;
        CHECK(pair.its[1]->next_word(&from, &heard) && from == 0 && heard == word);
        CHECK(pair.its[1]->next_word(&from, &heard) && from == 0 && heard == farewell);
        const Ticket receive = next[1]->irecv(0, 3, got.data(), got.size());
        Progress state = Progress::pending;
        for (int i = 0; i < 100 && state == Progress::pending; ++i) {
            next[0]->poll();
            next[1]->poll();
            state = test(*next[1], receive);
        }
        CHECK(state == Progress::done);
        CHECK(got == fresh);
        // What remains of the last epoch does not touch it.
        for (const auto& one : pair.its) one->close();
        next[1]->poll();
        CHECK(!next[1]->is_dead(0));
    }
}

TEST("over TCP, an epoch is not taken for a later one by a rank that reads both their ends late") {
    Pair pair;
    const auto renew = [&](size_t rank) {
        TcpLinks links = pair.its[rank]->end_epoch({0, 1}, {});
        pair.its[rank] = std::make_unique<TcpTransport>(static_cast<int>(rank), std::move(links), nullptr);
    };
    // What the second sends is long on its way: the first has gone through two epochs before any of it is here.
    renew(0);
    renew(0);
    const int32_t former = 13, latter = 42;
    renew(1);
    pair.its[1]->isend(0, 5, &former, sizeof former);
    renew(1);
    pair.its[1]->isend(0, 5, &latter, sizeof latter);
    int32_t got = 0;
    const Ticket receive = pair.its[0]->irecv(1, 5, &got, sizeof got);
    pair.settle();
    CHECK(test(*pair.its[0], receive) == Progress::done);
    CHECK_EQ(got, latter);
}
