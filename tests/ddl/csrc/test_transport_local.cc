#include "base/backoff.h"
#include "check.h"
#include "local_transport.h"

using namespace ddl;

namespace {

constexpr size_t kLong = 100000;  // beyond the eager limit

Progress test(Transport& transport, Ticket ticket) {
    size_t received = 0;
    return transport.test(ticket, &received);
}

}  // namespace

TEST("messages of a pair and a tag are matched in order, others by tag") {
    LocalNetwork network(2);
    const auto a = network.transport(0), b = network.transport(1);
    const int sent[] = {1, 2, 3};
    const Tag tags[] = {7, 7, 9};
    for (size_t i = 0; i < 3; ++i) CHECK(test(*a, a->isend(1, tags[i], &sent[i], sizeof(int))) == Progress::done);
    int got[3] = {};
    size_t received = 0;
    for (const size_t i : {2, 0, 1}) {
        CHECK(b->test(b->irecv(0, tags[i], &got[i], sizeof(int)), &received) == Progress::done);
        CHECK_EQ(received, sizeof(int));
        CHECK_EQ(got[i], sent[i]);
    }
    CHECK_EQ(network.pending(), size_t{0});
}

TEST("a long message completes when it is received, a short one at once") {
    LocalNetwork network(2);
    const auto a = network.transport(0), b = network.transport(1);
    std::vector<std::byte> out(kLong, std::byte{5}), in(kLong);
    const Ticket send = a->isend(1, 0, out.data(), out.size());
    CHECK(test(*a, send) == Progress::pending);
    CHECK(test(*b, b->irecv(0, 0, in.data(), in.size())) == Progress::done);
    CHECK(test(*a, send) == Progress::done);
    CHECK(in == out);
}

TEST("a message that is longer than its receive fails it and writes nothing") {
    LocalNetwork network(2);
    const auto a = network.transport(0), b = network.transport(1);
    int64_t out = -1;
    int32_t in[2] = {};
    a->isend(1, 0, &out, sizeof out);
    CHECK(test(*b, b->irecv(0, 0, in, sizeof in[0])) == Progress::failed);
    CHECK_EQ(in[0], 0);
}

TEST("a cancelled receive is written no more, and a cancelled send is read no more") {
    LocalNetwork network(2);
    const auto a = network.transport(0), b = network.transport(1);
    int out = 1, in = 0;
    b->cancel(b->irecv(0, 0, &in, sizeof in));
    a->isend(1, 0, &out, sizeof out);
    CHECK_EQ(in, 0);
    std::vector<std::byte> data(kLong);
    a->cancel(a->isend(1, 1, data.data(), data.size()));
    CHECK(test(*b, b->irecv(0, 1, data.data(), data.size())) == Progress::pending);
}

TEST("a delayed message arrives late and not before") {
    constexpr double kDelay = 0.02;
    LocalNetwork network(2);
    const auto a = network.transport(0), b = network.transport(1);
    network.delay(0, kDelay);
    const double begin = seconds_now();
    int out = 4, in = 0;
    a->isend(1, 0, &out, sizeof out);
    const Ticket receive = b->irecv(0, 0, &in, sizeof in);
    while (test(*b, receive) == Progress::pending) std::this_thread::yield();
    CHECK(seconds_now() - begin >= kDelay);
    CHECK_EQ(in, 4);
}

TEST("nothing passes a cut or reaches the dead, and only deaths are announced") {
    LocalNetwork network(4);
    const auto a = network.transport(0), b = network.transport(1);
    network.cut(0, 1);
    network.silence(2);
    network.kill(3);
    int out = 1, in = 0;
    for (const int peer : {1, 2, 3}) {
        a->isend(peer, 0, &out, sizeof out);
        a->notify(peer, &out, sizeof out);
    }
    Notice notice;
    CHECK(test(*b, b->irecv(0, 0, &in, sizeof in)) == Progress::pending);
    CHECK(!b->next_notice(&notice));
    CHECK(!a->is_dead(1));
    CHECK(!a->is_dead(2));
    CHECK(a->is_dead(3));
}

TEST("notices arrive with their sender and their content") {
    LocalNetwork network(2);
    const auto a = network.transport(0), b = network.transport(1);
    const char text[] = "hello";
    a->notify(1, text, sizeof text);
    Notice notice;
    CHECK(b->next_notice(&notice));
    CHECK_EQ(notice.from, 0);
    CHECK_EQ(std::string(reinterpret_cast<const char*>(notice.content.data())), std::string(text));
    CHECK(!b->next_notice(&notice));
}
