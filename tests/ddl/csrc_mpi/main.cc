// ddl_mpi_tests: what stands on MPI below the engine, the transport and mode m's groups, between two ranks or more.
// Exit status 1 if a check failed.
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "allocation.h"
#include "mpi/group_mpi.h"
#include "mpi/transport_mpi.h"

using namespace ddl;

namespace {

int failures = 0;

void check(bool condition, int line) {
    if (condition) return;
    ++failures;
    std::fprintf(stderr, "csrc_mpi/main.cc:%d: a check failed\n", line);
}
#define CHECK(condition) check(condition, __LINE__)

// MPI_Testsome does its work, or only fails, or does its work and then fails.
enum class Testsome { works, fails, fails_late } testsome = Testsome::works;

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

// A test of all messages that fails as a whole says nothing of any: what is on its way arrives, and what is wrong is
// found.
void a_test_of_all_messages_that_fails_is_no_result_of_one(MpiTransport& transport) {
    const int next = (transport.rank() + 1) % transport.size();
    const int previous = (transport.rank() + transport.size() - 1) % transport.size();
    const auto data = pattern(100);
    for (const Testsome kind : {Testsome::fails, Testsome::fails_late}) {
        const bool fits = kind == Testsome::fails;
        std::vector<unsigned char> target(fits ? data.size() : data.size() - 1);
        size_t received = 0;
        testsome = kind;
        const Ticket in = transport.irecv(previous, 9, target.data(), target.size());
        const Ticket out = transport.isend(next, 9, data.data(), data.size());
        CHECK(finish(transport, in, &received) == (fits ? Progress::done : Progress::failed));
        finish(transport, out, &received);
        testsome = Testsome::works;
        CHECK(!fits || target == data);
    }
}

// Whichever allocation fails, what was not started on one rank is no part of what MPI matches.
void a_collective_that_was_not_started_is_none() {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MpiGroup group(comm);
    int rank = 0, size = 0, failed = 1;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    for (int after = 0; failed; ++after) {
        std::vector<int32_t> all(static_cast<size_t>(size), -1);
        all[static_cast<size_t>(rank)] = 100 * after + rank;
        GroupCall call;
        call.gathers = true;
        call.to = all.data();
        call.count = all.size();
        call.type = DDL_INT32;
        Ticket ticket = 0;
        if (rank == 0) fail_allocations(after, 1);
        try {
            ticket = group.start(call);
            stop_failing();
            failed = 0;
        } catch (const std::bad_alloc&) {
            stop_failing();
            ticket = group.start(call);
        }
        while (!group.test(ticket)) std::this_thread::yield();
        for (int i = 0; i < size; ++i) CHECK(all[static_cast<size_t>(i)] == 100 * after + i);
        MPI_Bcast(&failed, 1, MPI_INT, 0, MPI_COMM_WORLD);
        CHECK(failed || after > 3);
    }
}

// Calls body(transport) with a fresh one.
template <typename Body>
void with_transport(size_t part_bytes, Body body) {
    MPI_Comm data, notices;
    MPI_Comm_dup(MPI_COMM_WORLD, &data);
    MPI_Comm_dup(MPI_COMM_WORLD, &notices);
    MpiTransportOptions options;
    options.part_bytes = part_bytes;
    MpiTransport transport(data, notices, std::move(options));
    body(transport);
    MPI_Barrier(MPI_COMM_WORLD);  // no rank closes while another still waits for its messages
}

}  // namespace

extern "C" int MPI_Testsome(int count, MPI_Request requests[], int* over, int indices[], MPI_Status statuses[]) {
    *over = 0;
    if (testsome == Testsome::fails) return MPI_ERR_OTHER;
    const int result = PMPI_Testsome(count, requests, over, indices, statuses);
    return testsome == Testsome::works ? result : MPI_ERR_OTHER;
}

int main() {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    with_transport(1000, [](MpiTransport& transport) {
        parts_arrive_in_order(transport, 1000);
        a_message_that_is_too_long_fails_its_receiver(transport);
        notices_arrive_from_everyone(transport);
        a_cancelled_receive_writes_no_more(transport);
        a_test_of_all_messages_that_fails_is_no_result_of_one(transport);
    });
    a_collective_that_was_not_started_is_none();
    with_transport(10 << 20, a_send_that_cannot_be_taken_back_is_known_to_be_in_use);
    MPI_Finalize();
    return failures == 0 ? 0 : 1;
}
