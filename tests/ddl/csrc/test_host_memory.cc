#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "base/status.h"
#include "check.h"
#include "talk.h"
#include "transport/host_memory.h"
#include "transport/pipe.h"

using namespace ddl;

namespace {

std::vector<HostMemory> share(const std::vector<std::string>& hosts) {
    LocalNetwork network(static_cast<int>(hosts.size()));
    std::vector<HostMemory> shared(hosts.size());
    const auto ends = talk(
        network,
        [&](Bootstrap& bootstrap) {
            shared[static_cast<size_t>(bootstrap.rank())] = share_memory(bootstrap, place(hosts), 0);
        },
        talk_options(hosts));
    for (const Status& end : ends) CHECK_EQ(end.message, std::string());
    CHECK_EQ(network.pending(), size_t{0});
    return shared;
}

}  // namespace

TEST("the ranks of a host share memory, and no others") {
    auto shared = share({"a", "b", "a", "c", "a", "b"});
    CHECK_EQ(shared[0].ranks.size(), size_t{3});
    CHECK(!shared[3].memory);
    CHECK_EQ(shared[3].reason, std::string("there is one rank"));
    for (const size_t rank : {0, 1, 2, 4, 5}) {
        CHECK(shared[rank].memory != nullptr);
        CHECK_CONTAINS(shared[rank].reason, "ranks have");
    }
    const auto passes = [&](size_t one, size_t from, size_t other, size_t to) {
        PipeWriter writer(shared[one].pipe(from, to), shared[one].pipe_bytes);
        PipeReader reader(shared[other].pipe(from, to), shared[other].pipe_bytes);
        CHECK(writer.write(5, {"hello", 5}));
        PipeReader::Message message;
        return reader.peek(&message) && message.tag == 5;
    };
    CHECK(passes(0, 0, 2, 1));
    CHECK(passes(4, 2, 0, 0));
    CHECK(passes(1, 0, 5, 1));
}

TEST("pipes do not overlap, and lie within the memory") {
    for (const size_t ranks : {2, 3, 8}) {
        HostMemory host;
        host.ranks.resize(ranks);
        host.pipe_bytes = pipe_bytes_for(ranks);
        host.memory = SharedMemory::create(host.bytes());
        std::set<std::byte*> begins;
        for (size_t from = 0; from < ranks; ++from) {
            for (size_t to = 0; to < ranks; ++to) {
                if (from != to) begins.insert(host.pipe(from, to));
            }
        }
        CHECK_EQ(begins.size(), ranks * (ranks - 1));
        std::byte* end = host.memory->data() + 64;  // behind the token
        for (std::byte* const begin : begins) {
            CHECK(begin >= end);
            end = begin + host.pipe_bytes;
        }
        CHECK(end <= host.memory->data() + host.memory->size());
    }
}

TEST("many ranks get smaller pipes, of a bounded size together, and too many none") {
    CHECK_EQ(pipe_bytes_for(1), size_t{0});
    size_t before = pipe_bytes_for(2);
    CHECK_EQ(longest_riding(before), kMostRiding);
    CHECK_EQ(longest_riding(0), size_t{0});
    CHECK_EQ(pipe_bytes_for(11), before);
    CHECK(pipe_bytes_for(12) < before);
    for (size_t ranks = 3; ranks < 1000; ++ranks) {
        const size_t bytes = pipe_bytes_for(ranks);
        CHECK(bytes <= before);
        CHECK(ranks * (ranks - 1) * bytes <= kMostHostMemory);
        if (bytes > 0) CHECK(longest_riding(bytes) >= 128);
        before = bytes;
    }
    CHECK(pipe_bytes_for(128) >= 4096);
    CHECK_EQ(before, size_t{0});
}

TEST("memory is found by process and descriptor, and what is none is refused with a reason") {
    const auto memory = SharedMemory::create(8192);
    memory->reserve(0, 8192);
    const auto refusal = [&](pid_t process, int descriptor, size_t bytes) {
        return check::message_of<Error>([&] { SharedMemory::open(process, descriptor, bytes); });
    };
    std::memcpy(memory->data() + 5000, "hello", 6);
    const auto same = SharedMemory::open(getpid(), memory->descriptor(), 8192);
    CHECK_EQ(std::string(reinterpret_cast<const char*>(same->data()) + 5000), std::string("hello"));
    CHECK_CONTAINS(refusal(getpid(), memory->descriptor(), 4096), "is not the memory that was offered");
    CHECK_CONTAINS(refusal(getpid(), 100'000, 8192), "No such file");
    const int other = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK_CONTAINS(refusal(getpid(), other, 8192), "is another process's");
    close(other);
    // Sealed: it cannot be cut off under a process that uses it.
    CHECK(ftruncate(memory->descriptor(), 0) != 0);
    const int descriptor = memory->descriptor();
    memory->close_descriptor();
    CHECK(!refusal(getpid(), descriptor, 8192).empty());
    CHECK_CONTAINS(check::message_of<Error>([&] { memory->reserve(0, 4096); }), "fallocate");
    CHECK_EQ(std::string(reinterpret_cast<const char*>(memory->data()) + 5000), std::string("hello"));
}

TEST("a rank that dies while memory is shared is named by the others") {
    const std::vector<std::string> hosts(3, "a");
    LocalNetwork network(3);
    network.kill(1);
    const auto ends = talk(network, [&](Bootstrap& bootstrap) {
        if (bootstrap.rank() != 1) share_memory(bootstrap, place(hosts), 0);
    });
    CHECK_EQ(ends[0].code, DDL_ERROR_PEER_LOST);
    CHECK_EQ(ends[2].code, DDL_ERROR_PEER_LOST);
}
