// ddl_mpi_tests: the transport over MPI between two ranks or more, below the engine. Exit status 1 where a check
// failed.
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "transport_mpi.h"

using namespace ddl;

namespace {

int failures = 0;

void check(bool condition, int line) {
    if (condition) return;
    ++failures;
    std::fprintf(stderr, "csrc_mpi/main.cc:%d: a check failed\n", line);
}
#define CHECK(condition) check(condition, __LINE__)

Progress finish(MpiTransport& transport, Ticket ticket, size_t* received) {
    for (;;) {
        transport.poll();
        const Progress progress = transport.test(ticket, received);
        if (progress != Progress::pending) return progress;
        std::this_thread::yield();
    }
}

std::vector<unsigned char> pattern(size_t bytes) {
    std::vector<unsigned char> data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(i * 7 + i / 251);
    return data;
}

// Every rank sends to the next; lengths around the limit from which on messages travel in parts.
void parts_arrive_in_order(MpiTransport& transport, size_t part) {
    const int next = (transport.rank() + 1) % transport.size();
    const int previous = (transport.rank() + transport.size() - 1) % transport.size();
    for (const size_t bytes : {size_t{0}, size_t{1}, part - 1, part, part + 1, 3 * part, 100 * part + 17}) {
        const auto data = pattern(bytes);
        std::vector<unsigned char> target(bytes, 255);
        size_t received = 0;
        const Ticket in = transport.irecv(previous, 5, target.data(), bytes);
        const Ticket out = transport.isend(next, 5, data.data(), bytes);
        CHECK(finish(transport, in, &received) == Progress::done);
        CHECK(received == bytes);
        CHECK(target == data);
        CHECK(finish(transport, out, &received) == Progress::done);
    }
}

void a_message_that_is_too_long_fails_its_receiver(MpiTransport& transport) {
    const int other = transport.rank() ^ 1;
    if (other >= transport.size()) return;
    char small[4] = {}, large[8] = {};
    size_t received = 0;
    const Ticket in = transport.irecv(other, 6, small, sizeof small);
    const Ticket out = transport.isend(other, 6, large, sizeof large);
    CHECK(finish(transport, in, &received) == Progress::failed);
    CHECK(finish(transport, out, &received) == Progress::done);
}

void notices_arrive_from_everyone(MpiTransport& transport) {
    constexpr int kEach = 40;  // more than receives are posted for
    for (int i = 0; i < kEach; ++i) {
        for (int peer = 0; peer < transport.size(); ++peer) {
            const int words[] = {transport.rank(), i};
            if (peer != transport.rank()) transport.notify(peer, words, sizeof words);
        }
    }
    std::vector<int> next(static_cast<size_t>(transport.size()));
    for (int left = kEach * (transport.size() - 1); left > 0;) {
        transport.poll();
        for (Notice notice; transport.next_notice(&notice); --left) {
            int words[2];
            CHECK(notice.content.size() == sizeof words);
            std::memcpy(words, notice.content.data(), sizeof words);
            CHECK(words[0] == notice.from);
            CHECK(words[1] == next[static_cast<size_t>(notice.from)]++);
        }
    }
}

void a_cancelled_receive_writes_no_more(MpiTransport& transport) {
    std::vector<char> target(1 << 20, 1);
    const int other = (transport.rank() + 1) % transport.size();
    CHECK(transport.cancel(transport.irecv(other, 7, target.data(), target.size())));
    CHECK(std::accumulate(target.begin(), target.end(), 0) == 1 << 20);
}

// MPI takes back no send: its memory is in use, and its ticket lives, until the receiver has it.
void a_send_that_cannot_be_taken_back_is_known_to_be_in_use(MpiTransport& transport) {
    const int next = (transport.rank() + 1) % transport.size();
    const int previous = (transport.rank() + transport.size() - 1) % transport.size();
    const auto data = pattern(32 << 20);  // in parts, so long that none is copied
    std::vector<unsigned char> target(data.size());
    size_t received = 0;
    const Ticket out = transport.isend(next, 8, data.data(), data.size());
    CHECK(!transport.cancel(out));
    CHECK(transport.test(out, &received) == Progress::pending);
    MPI_Barrier(MPI_COMM_WORLD);
    const Ticket in = transport.irecv(previous, 8, target.data(), target.size());
    CHECK(finish(transport, in, &received) == Progress::done);
    CHECK(target == data);
    CHECK(finish(transport, out, &received) == Progress::done);
}

// Calls body(transport) with one that nobody has used.
template <typename Body>
void with_transport(size_t part_bytes, Body body) {
    MPI_Comm data, notices;
    MPI_Comm_dup(MPI_COMM_WORLD, &data);
    MPI_Comm_dup(MPI_COMM_WORLD, &notices);
    MpiTransportOptions options;
    options.part_bytes = part_bytes;
    MpiTransport transport(data, notices, std::move(options));
    body(transport);
    MPI_Barrier(MPI_COMM_WORLD);  // nobody closes while another still waits for its messages
}

}  // namespace

int main() {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    with_transport(1000, [](MpiTransport& transport) {
        parts_arrive_in_order(transport, 1000);
        a_message_that_is_too_long_fails_its_receiver(transport);
        notices_arrive_from_everyone(transport);
        a_cancelled_receive_writes_no_more(transport);
    });
    with_transport(10 << 20, a_send_that_cannot_be_taken_back_is_known_to_be_in_use);
    MPI_Finalize();
    return failures == 0 ? 0 : 1;
}
