// The memory that the ranks of a host share: pipes from each of them to each other, and how they come to it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "schedule/placement.h"
#include "transport/bootstrap.h"
#include "transport/shared_memory.h"

namespace ddl {

// Most bytes of a host, whatever the number of its ranks.
constexpr size_t kMostHostMemory = 64 << 20;
// Longer messages are the wrapped transport's. Two ranks that sum up to 64 MiB send no longer ones. Over a loopback
// these would take two to three times as long.
constexpr size_t kMostRiding = 128 << 10;

// Bytes of a pipe between two of `ranks`, a power of two; 0 if there are too many for useful pipes.
size_t pipe_bytes_for(size_t ranks);
// How long a message may be that rides in such a pipe: so that three find room.
size_t longest_riding(size_t pipe_bytes);

struct HostMemory {
    std::shared_ptr<SharedMemory> memory;  // null: there is none
    std::vector<int> ranks;                // of this host, ascending
    size_t pipe_bytes = 0;
    std::string reason;  // why there is some, or none

    // Of the memory that it takes.
    size_t bytes() const;
    // The address of the pipe from one of `ranks` to another, by their places in it.
    std::byte* pipe(size_t from, size_t to) const;
};

// Collective over the ranks of each host: all of them have it afterwards, or none. Uses two tags. Throws Error, as
// Bootstrap::await() does.
HostMemory share_memory(Bootstrap& bootstrap, const Placement& placement, Tag tag);

}  // namespace ddl
