#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "allocation.h"
#include "check.h"
#include "hosts.h"
#include "stubborn.h"
#include "transport/transport_shared.h"

using namespace ddl;

namespace {

constexpr size_t kSmallPipe = 1024;  // 14 lines; what is longer than 256 bytes goes through the wrapped transport
constexpr size_t kShort = 100, kLong = 200'000;

std::vector<std::byte> content(size_t number, size_t bytes) {
    std::vector<std::byte> data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(number * 31 + i * 7 + i / 256);
    return data;
}

// Polls both until the ticket of `mine` is over.
Progress finish(Transport& mine, Transport& other, Ticket ticket, size_t* received = nullptr) {
    for (int i = 0; i < 1000; ++i) {
        mine.poll();
        other.poll();
        size_t bytes = 0;
        const Progress progress = mine.test(ticket, &bytes);
        if (progress == Progress::pending) continue;
        if (received) *received = bytes;
        return progress;
    }
    return Progress::pending;
}

Progress look(Transport& transport, Ticket ticket) {
    size_t received = 0;
    transport.poll();
    return transport.test(ticket, &received);
}

// The promises of any transport: `made` has ranks 0 and 1.
void keeps_the_contract(const std::function<Transports(LocalNetwork&)>& make) {
    LocalNetwork network(2);
    const Transports made = make(network);
    Transport &a = *made[0], &b = *made[1];
    const size_t lengths[] = {0, 1, 48, 100, 256, 257, 5000, kLong, 7, kLong, 0};
    constexpr size_t kCount = std::size(lengths);
    for (const bool receives_first : {false, true}) {
        for (const bool one_tag : {false, true}) {
            std::vector<std::vector<std::byte>> sent, got;
            std::vector<Ticket> sends, receives;
            for (size_t i = 0; i < kCount; ++i) {
                sent.push_back(content(i, lengths[i]));
                got.emplace_back(kLong);
            }
            const auto tag = [&](size_t i) { return one_tag ? Tag{3} : static_cast<Tag>(20 - i); };
            const auto send_all = [&] {
                for (size_t i = 0; i < kCount; ++i) sends.push_back(a.isend(1, tag(i), sent[i].data(), lengths[i]));
            };
            const auto receive_all = [&] {
                for (size_t i = 0; i < kCount; ++i) receives.push_back(b.irecv(0, tag(i), got[i].data(), kLong));
            };
            receives_first ? receive_all() : send_all();
            receives_first ? send_all() : receive_all();
            for (size_t i = 0; i < kCount; ++i) {
                size_t received = 0;
                CHECK(finish(b, a, receives[i], &received) == Progress::done);
                CHECK_EQ(received, lengths[i]);
                got[i].resize(lengths[i]);
                CHECK(got[i] == sent[i]);
                CHECK(finish(a, b, sends[i]) == Progress::done);
            }
        }
    }
    // Tags that are received in another order than sent.
    std::vector<std::vector<std::byte>> got(3, std::vector<std::byte>(kLong));
    const auto one = content(1, 10), two = content(2, kLong), three = content(3, 20);
    const Ticket sends[] = {a.isend(1, 1, one.data(), 10), a.isend(1, 2, two.data(), kLong),
                            a.isend(1, 3, three.data(), 20)};
    CHECK(finish(b, a, b.irecv(0, 3, got[2].data(), 20)) == Progress::done);
    CHECK(finish(b, a, b.irecv(0, 1, got[0].data(), 20)) == Progress::done);
    CHECK(finish(b, a, b.irecv(0, 2, got[1].data(), kLong)) == Progress::done);
    for (const Ticket send : sends) CHECK(finish(a, b, send) == Progress::done);
    got[0].resize(10);
    got[2].resize(20);
    CHECK(got[0] == one && got[1] == two && got[2] == three);
    // Longer than the receive has room for: it fails, and those behind it are what they are.
    for (const size_t bytes : {kShort, kLong}) {
        std::vector<std::byte> room(bytes);
        const auto data = content(9, bytes), next = content(10, bytes);
        const Ticket long_one = a.isend(1, 4, data.data(), bytes), right = a.isend(1, 4, next.data(), bytes);
        CHECK(finish(b, a, b.irecv(0, 4, room.data(), bytes - 1)) == Progress::failed);
        CHECK(finish(b, a, b.irecv(0, 4, room.data(), bytes)) == Progress::done);
        CHECK(room == next);
        CHECK(finish(a, b, long_one) == Progress::done);
        CHECK(finish(a, b, right) == Progress::done);
    }
    CHECK_EQ(network.pending(), size_t{0});
    // In two parts, behind what has to wait: at once or not at all.
    const auto data = content(11, 250);
    std::vector<Ticket> open;
    size_t now = 0;
    for (int i = 0; i < 30; ++i) {
        if (a.send_now(1, 5, data.data(), 24, data.data() + 24, 226)) {
            ++now;
        } else {
            open.push_back(a.isend(1, 5, data.data(), 250));
        }
    }
    for (int i = 0; i < 30; ++i) {
        std::vector<std::byte> room(250);
        CHECK(finish(b, a, b.irecv(0, 5, room.data(), 250)) == Progress::done);
        CHECK(room == data);
    }
    CHECK_EQ(now + open.size(), size_t{30});
    for (const Ticket ticket : open) CHECK(finish(a, b, ticket) == Progress::done);
}

}  // namespace

TEST("each transport keeps the contract: order, lengths, tags, and what is too long") {
    keeps_the_contract([](LocalNetwork& network) {
        Transports made;
        for (int rank : {0, 1}) made.push_back(network.transport(rank));
        return made;
    });
    keeps_the_contract([](LocalNetwork& network) { return shared_transports(network); });
    keeps_the_contract([](LocalNetwork& network) { return shared_transports(network, kSmallPipe); });
    keeps_the_contract([](LocalNetwork& network) { return shared_transports(network, {0, 1}); });
}

TEST("a message can be read where it lies, unless another is before it or the end of the pipe cuts it") {
    LocalNetwork network(2);
    const Transports made = shared_transports(network, kSmallPipe);
    Transport &a = *made[0], &b = *made[1];
    CHECK(b.shows(0, 256) && !b.shows(0, 257));
    constexpr size_t kBytes = 200;  // four lines of the pipe's 14, with their envelope
    const std::byte* seen = nullptr;
    size_t bytes = 0;
    int cut = 0;
    for (size_t i = 0; i < 70; ++i) {
        const auto sent = content(i, kBytes);
        CHECK(!b.peek(0, 7, &seen, &bytes));
        CHECK(a.send_now(1, 7, sent.data(), kBytes, nullptr, 0));
        CHECK(b.peek(0, 8, &seen, &bytes) && !seen);
        CHECK(b.peek(0, 7, &seen, &bytes));
        if (seen) {
            CHECK_EQ(bytes, kBytes);
            CHECK(std::memcmp(seen, sent.data(), kBytes) == 0);
            b.drop(0);
        } else {
            ++cut;
            std::vector<std::byte> room(kBytes);
            CHECK(finish(b, a, b.irecv(0, 7, room.data(), kBytes)) == Progress::done);
            CHECK(room == sent);
        }
    }
    CHECK_EQ(cut, 20 - 10);  // of 20 ends of the pipe that 280 lines reach, every other lies between two messages
    // A receive of this tag is posted: the message is its own.
    const auto one = content(1, 10), two = content(2, 10);
    std::vector<std::byte> room(10);
    const Ticket first = b.irecv(0, 7, room.data(), 10);
    CHECK(a.send_now(1, 7, one.data(), 10, nullptr, 0));
    CHECK(b.peek(0, 7, &seen, &bytes) && !seen);
    CHECK(finish(b, a, first) == Progress::done);
    // One of this tag made way for another message.
    const Ticket other = b.irecv(0, 9, room.data(), 10);
    CHECK(a.send_now(1, 7, one.data(), 10, nullptr, 0));
    CHECK(a.send_now(1, 9, two.data(), 10, nullptr, 0));
    CHECK(finish(b, a, other) == Progress::done);
    CHECK(a.send_now(1, 7, two.data(), 10, nullptr, 0));
    CHECK(b.peek(0, 7, &seen, &bytes) && !seen);
    CHECK(finish(b, a, b.irecv(0, 7, room.data(), 10)) == Progress::done);
    CHECK(room == one);
    CHECK(b.peek(0, 7, &seen, &bytes) && seen);
    b.drop(0);
    CHECK(!b.peek(0, 7, &seen, &bytes));
    // One that goes through the wrapped transport is not here.
    const auto large = content(3, kLong);
    std::vector<std::byte> large_room(kLong);
    const Ticket sent = a.isend(1, 7, large.data(), kLong);
    CHECK(b.peek(0, 7, &seen, &bytes) && !seen);
    CHECK(finish(b, a, b.irecv(0, 7, large_room.data(), kLong)) == Progress::done);
    CHECK(finish(a, b, sent) == Progress::done);
    CHECK(large_room == large);
}

TEST("a message is reduced where it lies: before or after it is awaited, and across the end of the pipe") {
    LocalNetwork network(2);
    const Transports made = shared_transports(network, kSmallPipe);
    Transport &a = *made[0], &b = *made[1];
    std::vector<float> sent(25), mine(25), out(25);
    for (int round = 0; round < 40; ++round) {
        for (size_t i = 0; i < sent.size(); ++i) {
            sent[i] = static_cast<float>(round * 100) + static_cast<float>(i);
            mine[i] = static_cast<float>(i) / 2;
        }
        const bool early = round % 2 == 0, other_first = round % 4 < 2, in_place = round % 8 < 4;
        std::vector<float>& target = in_place ? mine : out;
        const std::vector<float> before = mine;
        const Reduction reduction{reinterpret_cast<std::byte*>(target.data()),
                                  reinterpret_cast<std::byte*>(mine.data()), DDL_FLOAT32, DDL_SUM, round % 3 == 0};
        const size_t bytes = sent.size() * sizeof(float);
        std::byte one{};
        Ticket receive = 0;
        if (!early) receive = b.irecv_reduce(0, 1, reduction, bytes);
        const Ticket send = a.isend(1, 1, sent.data(), bytes), other = a.isend(1, 2, &one, 1);
        if (other_first)
            CHECK(finish(b, a, b.irecv(0, 2, &one, 1)) == Progress::done);  // which keeps the first as a copy
        if (early) receive = b.irecv_reduce(0, 1, reduction, bytes);
        size_t received = 0;
        CHECK(finish(b, a, receive, &received) == Progress::done);
        CHECK_EQ(received, bytes);
        for (size_t i = 0; i < sent.size(); ++i) CHECK_EQ(target[i], before[i] + sent[i]);
        if (!other_first) CHECK(finish(b, a, b.irecv(0, 2, &one, 1)) == Progress::done);
        CHECK(finish(a, b, send) == Progress::done);
        CHECK(finish(a, b, other) == Progress::done);
    }
    CHECK_EQ(network.pending(), size_t{0});
}

TEST("a message that cannot be reduced where it lies is not, and one of another length fails") {
    LocalNetwork network(2);
    const Transports made = shared_transports(network, kSmallPipe);
    Transport &a = *made[0], &b = *made[1];
    std::vector<std::byte> out(kLong);
    const Reduction reduction{out.data(), out.data(), DDL_UINT8, DDL_SUM, false};
    CHECK_EQ(b.irecv_reduce(0, 1, reduction, kLong), Ticket{0});
    const auto data = content(1, kLong);
    for (const size_t bytes : {kShort + 1, kLong}) {  // through the pipe, and through the wrapped transport
        const Ticket send = a.isend(1, 1, data.data(), bytes);
        CHECK(finish(b, a, b.irecv_reduce(0, 1, reduction, kShort)) == Progress::failed);
        CHECK(finish(a, b, send) == Progress::done);
    }
    const Ticket taken_back = b.irecv_reduce(0, 1, reduction, kShort);
    CHECK(b.cancel(taken_back));
    const Ticket send = a.isend(1, 1, data.data(), kShort);
    std::vector<std::byte> room(kShort);
    CHECK(finish(b, a, b.irecv(0, 1, room.data(), kShort)) == Progress::done);
    CHECK(room == content(1, kShort));
    CHECK(finish(a, b, send) == Progress::done);
    CHECK(out == std::vector<std::byte>(kLong));
    CHECK_EQ(network.pending(), size_t{0});
    LocalNetwork alone(2);
    CHECK_EQ(alone.transport(0)->irecv_reduce(1, 1, reduction, kShort), Ticket{0});
}

TEST("a short message passes through shared memory alone, a long one through the wrapped transport") {
    LocalNetwork network(2);
    const Transports made = shared_transports(network);
    const auto data = content(1, kLong);
    CHECK(look(*made[0], made[0]->isend(1, 0, data.data(), 16 << 10)) == Progress::done);
    CHECK_EQ(network.pending(), size_t{0});
    const Ticket send = made[0]->isend(1, 0, data.data(), kLong);
    CHECK_EQ(network.pending(), size_t{1});
    std::vector<std::byte> got(kLong);
    CHECK(look(*made[1], made[1]->irecv(0, 0, got.data(), kLong)) == Progress::done);
    CHECK(look(*made[1], made[1]->irecv(0, 0, got.data(), kLong)) == Progress::done);
    CHECK(got == data);
    CHECK(look(*made[0], send) == Progress::done);
}

TEST("with a full pipe sends stay pending, and all arrive in order when it is read") {
    LocalNetwork network(2);
    const Transports made = shared_transports(network, kSmallPipe);
    Transport &a = *made[0], &b = *made[1];
    constexpr size_t kCount = 100;
    std::vector<std::vector<std::byte>> sent;
    std::vector<Ticket> sends;
    const auto bytes = [](size_t i) { return i % 5 == 4 ? kLong : i * 2; };
    for (size_t i = 0; i < kCount; ++i) {
        sent.push_back(content(i, bytes(i)));
        sends.push_back(a.isend(1, i % 3, sent[i].data(), sent[i].size()));
    }
    CHECK(look(a, sends.front()) == Progress::done);
    CHECK(look(a, sends[kCount - 2]) == Progress::pending);
    // Of the last tag first: all others are kept meanwhile.
    for (const Tag tag : {2, 0, 1}) {
        for (size_t i = 0; i < kCount; ++i) {
            if (i % 3 != tag) continue;
            std::vector<std::byte> got(kLong);
            size_t received = 0;
            CHECK(finish(b, a, b.irecv(0, tag, got.data(), kLong), &received) == Progress::done);
            CHECK_EQ(received, bytes(i));
            got.resize(received);
            CHECK(got == sent[i]);
        }
    }
    for (size_t i = 1; i < kCount; ++i) CHECK(finish(a, b, sends[i]) == Progress::done);
    CHECK_EQ(network.pending(), size_t{0});
}

TEST("a message gets through to its receive, whatever else fills the pipe") {
    LocalNetwork network(2);
    const Transports made = shared_transports(network, kSmallPipe);
    const auto data = content(1, kShort);
    std::vector<Ticket> sends;
    for (int i = 0; i < 50; ++i) sends.push_back(made[0]->isend(1, 7, data.data(), kShort));  // nobody asks for them
    made[0]->isend(1, 8, data.data(), kShort);
    std::vector<std::byte> got(kShort);
    CHECK(finish(*made[1], *made[0], made[1]->irecv(0, 8, got.data(), kShort)) == Progress::done);
    CHECK(got == data);
}

TEST("what is cancelled is used no more, and the others arrive") {
    LocalNetwork network(2);
    const Transports made = shared_transports(network, kSmallPipe);
    Transport &a = *made[0], &b = *made[1];
    std::vector<std::byte> untouched(kLong), got(kLong);
    const std::vector<std::byte> zeros(kLong);
    // Receives that nothing came for.
    CHECK(b.cancel(b.irecv(0, 1, untouched.data(), kShort)));
    CHECK(b.cancel(b.irecv(0, 1, untouched.data(), kLong)));
    const auto data = content(1, kLong);
    a.isend(1, 1, data.data(), kShort);
    CHECK(finish(b, a, b.irecv(0, 1, got.data(), kLong)) == Progress::done);
    // A receive that has its message, and one whose long message the wrapped transport holds.
    a.isend(1, 2, data.data(), kShort);
    const Ticket complete = b.irecv(0, 2, got.data(), kShort);
    b.poll();
    CHECK(b.cancel(complete));
    // Sends: sent, waiting for room (short and long), and in the wrapped transport.
    CHECK(a.cancel(a.isend(1, 3, data.data(), kShort)));
    std::vector<Ticket> waiting;
    for (int i = 0; i < 20; ++i) waiting.push_back(a.isend(1, 4, data.data(), i % 2 ? kLong : kShort));
    CHECK(look(a, waiting.back()) == Progress::pending);
    for (const Ticket ticket : waiting) CHECK(a.cancel(ticket));
    a.isend(1, 5, data.data(), kShort);
    CHECK(finish(b, a, b.irecv(0, 5, got.data(), kShort)) == Progress::done);
    CHECK(std::memcmp(got.data(), data.data(), kShort) == 0);
    CHECK(untouched == zeros);
}

TEST("a message that the wrapped transport does not take back still arrives: its envelope finds room") {
    LocalNetwork network(2);
    Stubborn::Control control;
    const Transports made = shared_transports(network, {0, 0}, kSmallPipe, [&](std::unique_ptr<Transport> transport) {
        return std::make_unique<Stubborn>(std::move(transport), control);
    });
    Transport &a = *made[0], &b = *made[1];
    const auto short_one = content(1, kShort), long_one = content(2, kLong);
    std::vector<Ticket> before;
    for (int i = 0; i < 20; ++i) before.push_back(a.isend(1, 1, short_one.data(), kShort));
    CHECK(look(a, before.back()) == Progress::pending);  // the pipe is full
    const Ticket kept = a.isend(1, 2, long_one.data(), kLong), behind = a.isend(1, 2, short_one.data(), kShort);
    CHECK(!a.cancel(kept));
    CHECK(look(a, kept) == Progress::pending);
    std::vector<std::byte> got(kLong), next(kShort);
    const Ticket first = b.irecv(0, 2, got.data(), kLong), second = b.irecv(0, 2, next.data(), kShort);
    CHECK(finish(b, a, first) == Progress::done);
    CHECK(finish(b, a, second) == Progress::done);
    CHECK(got == long_one && next == short_one);
    CHECK(finish(a, b, kept) == Progress::done);
    CHECK(finish(a, b, behind) == Progress::done);
    for (const Ticket ticket : before) {
        CHECK(finish(b, a, b.irecv(0, 1, next.data(), kShort)) == Progress::done);
        CHECK(finish(a, b, ticket) == Progress::done);
    }
    // A receive whose message the wrapped transport has begun is not taken back either.
    const Ticket send = a.isend(1, 3, long_one.data(), kLong);
    std::fill(got.begin(), got.end(), std::byte{0});
    const Ticket receive = b.irecv(0, 3, got.data(), kLong);
    b.poll();
    CHECK(!b.cancel(receive));
    CHECK(finish(b, a, receive) == Progress::done);
    CHECK(got == long_one);
    CHECK(finish(a, b, send) == Progress::done);
    CHECK_EQ(network.pending(), size_t{0});
}

TEST("many ranks on uneven hosts exchange random messages with all others") {
    const std::vector<int> host_of{0, 1, 0, 2, 1, 0, 0, 3};
    const int size = static_cast<int>(host_of.size());
    for (const size_t pipe_bytes : {size_t{0}, kSmallPipe}) {
        LocalNetwork network(size);
        const Transports made = shared_transports(network, host_of, pipe_bytes);
        const int count = check::kSanitized ? 40 : 150;
        const auto bytes_of = [&](int from, int to, int i) {
            std::mt19937_64 random(check::seed() + static_cast<uint64_t>((from * size + to) * 1000 + i));
            const size_t most[] = {100, 1000, 30'000};
            return random() % most[random() % 3];
        };
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size; ++rank) {
            threads.emplace_back([&, rank] {
                Transport& mine = *made[static_cast<size_t>(rank)];
                struct Open {
                    Ticket ticket;
                    int peer, number;
                    bool incoming;
                    std::vector<std::byte> data;
                };
                std::vector<Open> open;
                for (int i = 0; i < count; ++i) {
                    for (int peer = 0; peer < size; ++peer) {
                        if (peer == rank) continue;
                        open.push_back({0, peer, i, true, std::vector<std::byte>(30'000)});
                        open.back().ticket = mine.irecv(peer, static_cast<Tag>(i % 2), open.back().data.data(), 30'000);
                        const auto number = static_cast<size_t>(rank + i);
                        open.push_back({0, peer, i, false, content(number, bytes_of(rank, peer, i))});
                        open.back().ticket =
                            mine.isend(peer, static_cast<Tag>(i % 2), open.back().data.data(), open.back().data.size());
                    }
                    // Some stay in flight while the next ones are posted.
                    const size_t left = i + 1 == count ? 0 : static_cast<size_t>(4 * size);
                    while (open.size() > left) {
                        mine.poll();
                        for (size_t k = 0; k < open.size();) {
                            Open& one = open[k];
                            size_t received = 0;
                            const Progress progress = mine.test(one.ticket, &received);
                            if (progress == Progress::pending) {
                                ++k;
                                continue;
                            }
                            CHECK(progress == Progress::done);
                            if (one.incoming) {
                                one.data.resize(received);
                                const auto number = static_cast<size_t>(one.peer + one.number);
                                CHECK(one.data == content(number, bytes_of(one.peer, rank, one.number)));
                            }
                            open.erase(open.begin() + static_cast<ptrdiff_t>(k));
                        }
                        std::this_thread::yield();
                    }
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
        CHECK_EQ(network.pending(), size_t{0});
    }
}

TEST("whichever allocation fails, a message that was posted arrives") {
    constexpr size_t kMore = 1000;  // through the wrapped transport
    const auto data = content(1, kMore);
    bool failed = true;
    int64_t after = 0;
    for (; failed; ++after) {
        LocalNetwork network(2);
        const Transports made = shared_transports(network, kSmallPipe);
        Transport &a = *made[0], &b = *made[1];
        std::vector<std::pair<Ticket, size_t>> sends, receives;
        std::vector<std::vector<std::byte>> got(40, std::vector<std::byte>(kMore));
        sends.reserve(40);
        receives.reserve(40);
        fail_allocations(after, 1);
        for (size_t i = 0; i < 40; ++i) {
            try {
                const size_t bytes = i % 4 == 3 ? kMore : kShort;
                sends.emplace_back(a.isend(1, i % 2, data.data(), bytes), bytes);
            } catch (const std::bad_alloc&) {
                // Not posted: nothing of it arrives.
            }
        }
        // First receive one tag, so that the other tag's messages are kept.
        for (const size_t tag : {1, 0}) {
            for (size_t i = tag; i < 40; i += 2) {
                try {
                    receives.emplace_back(b.irecv(0, static_cast<Tag>(tag), got[receives.size()].data(), kMore), tag);
                } catch (const std::bad_alloc&) {
                    continue;
                }
                a.poll();
                b.poll();
            }
        }
        failed = stop_failing();
        size_t arrived = 0;
        for (size_t i = 0; i < receives.size(); ++i) {
            size_t received = 0;
            if (finish(b, a, receives[i].first, &received) != Progress::done) continue;
            CHECK(received == kShort || received == kMore);
            CHECK(std::memcmp(got[i].data(), data.data(), received) == 0);
            ++arrived;
        }
        CHECK(arrived + 2 >= 40);
        CHECK(failed || arrived == 40);
    }
    CHECK(after > 10);
}
