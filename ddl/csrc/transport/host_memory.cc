#include "transport/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "base/random_number.h"
#include "base/status.h"
#include "transport/pipe.h"

namespace ddl {
namespace {

constexpr size_t kMostPipe = 512 << 10;
constexpr size_t kLeastUsefulPipe = 1 << 10;
constexpr size_t kPage = 4 << 10;  // before the pipes; holds the token

// A message between ranks of a host that set memory up. On the wire as it stands.
struct Word {
    uint64_t token = 0;  // random, and in the memory as well: the memory that is opened is the one that was offered
    int32_t ok = 0;
    int32_t process = 0, descriptor = 0;
    char reason[236] = "";
};

void refuse(Word& word, const std::string& who, const std::string& why) {
    word.ok = 0;
    std::snprintf(word.reason, sizeof word.reason, "%s: %s", who.c_str(), why.c_str());
}

size_t inbox_bytes(const HostMemory& host) { return (host.ranks.size() - 1) * host.pipe_bytes; }

// Its own part: each rank takes the pages that it will read, so that they lie near its processor.
void reserve_inbox(const HostMemory& host, SharedMemory& memory, size_t place) {
    memory.reserve(kPage + place * inbox_bytes(host), inbox_bytes(host));
}

std::unique_ptr<SharedMemory> offer(const HostMemory& host, Word& word) {
    auto memory = SharedMemory::create(host.bytes());
    memory->reserve(0, kPage);
    word.token = random_number();
    std::memcpy(memory->data(), &word.token, sizeof word.token);
    reserve_inbox(host, *memory, 0);
    word.process = getpid();
    word.descriptor = memory->descriptor();
    return memory;
}

std::unique_ptr<SharedMemory> take(const HostMemory& host, const Word& word, size_t place) {
    auto memory = SharedMemory::open(word.process, word.descriptor, host.bytes());
    if (std::memcmp(memory->data(), &word.token, sizeof word.token) != 0) {
        throw Error(DDL_ERROR_UNSUPPORTED, "what it found is another job's: do the ranks see different processes?");
    }
    reserve_inbox(host, *memory, place);
    return memory;
}

}  // namespace

size_t pipe_bytes_for(size_t ranks) {
    if (ranks < 2) return 0;
    size_t bytes = kMostPipe;
    while (bytes >= kLeastUsefulPipe && ranks * (ranks - 1) * bytes > kMostHostMemory) bytes /= 2;
    return bytes >= kLeastUsefulPipe ? bytes : 0;
}

size_t longest_riding(size_t pipe_bytes) {
    if (pipe_bytes == 0) return 0;
    return std::min(kMostRiding, PipeMemory::longest_payload(pipe_bytes) / 3 / kPipeLine * kPipeLine);
}

size_t HostMemory::bytes() const { return kPage + ranks.size() * inbox_bytes(*this); }

std::byte* HostMemory::pipe(size_t from, size_t to) const {
    const size_t before = from - (from > to ? 1 : 0);  // in the receiver's inbox, which has none from itself
    return memory->data() + kPage + (to * (ranks.size() - 1) + before) * pipe_bytes;
}

HostMemory share_memory(Bootstrap& bootstrap, const Placement& placement, Tag tag) {
    HostMemory host;
    const int rank = bootstrap.rank(), here = placement.host_of[static_cast<size_t>(rank)];
    for (int other = 0; other < bootstrap.size(); ++other) {
        if (placement.host_of[static_cast<size_t>(other)] == here) host.ranks.push_back(other);
    }
    const auto place = static_cast<size_t>(std::find(host.ranks.begin(), host.ranks.end(), rank) - host.ranks.begin());
    const int leader = host.ranks[0];
    if (host.ranks.size() < 2) {
        host.reason = "there is one rank";
        return host;
    }
    host.pipe_bytes = pipe_bytes_for(host.ranks.size());
    if (host.pipe_bytes == 0) {
        host.reason = std::to_string(host.ranks.size()) + " ranks would need more than " +
                      std::to_string(kMostHostMemory >> 20) + " MiB";
        return host;
    }
    Word word;
    std::unique_ptr<SharedMemory> memory;
    bootstrap.run([&] {
        const auto attempt = [&](const auto& make) {
            try {
                memory = make();
                word.ok = 1;
            } catch (const std::exception& error) {  // also of no memory: the others wait for a word
                refuse(word, "rank " + std::to_string(rank), error.what());
            }
        };
        if (rank != leader) {
            bootstrap.hear(leader, tag, &word, sizeof word);
            if (word.ok) attempt([&] { return take(host, word, place); });
            bootstrap.say(leader, tag, &word, sizeof word);
            bootstrap.hear(leader, tag + 1, &word, sizeof word);
            return;
        }
        attempt([&] { return offer(host, word); });
        for (size_t i = 1; i < host.ranks.size(); ++i) bootstrap.say(host.ranks[i], tag, &word, sizeof word);
        for (size_t i = 1; i < host.ranks.size(); ++i) {
            Word answer;
            bootstrap.hear(host.ranks[i], tag, &answer, sizeof answer);
            if (word.ok && !answer.ok) word = answer;
        }
        for (size_t i = 1; i < host.ranks.size(); ++i) bootstrap.say(host.ranks[i], tag + 1, &word, sizeof word);
    });
    if (!word.ok) {
        word.reason[sizeof word.reason - 1] = '\0';
        host.reason = word.reason;
        return host;
    }
    memory->close_descriptor();
    host.memory = std::move(memory);
    char text[120];
    std::snprintf(text, sizeof text, "%zu ranks have %.3g MiB, messages up to %zu bytes pass through it",
                  host.ranks.size(), static_cast<double>(host.bytes()) / (1 << 20), longest_riding(host.pipe_bytes));
    host.reason = text;
    return host;
}

}  // namespace ddl
