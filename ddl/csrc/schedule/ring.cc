// Reduce-scatter and allgather over the plan's order of ranks. A ring in that order enters and leaves each host and
// each rack once. So (n - 1) / n of the bytes cross each uplink, within a small factor of the least that any algorithm
// needs.
#include "schedule/builder.h"

namespace ddl {
namespace {

Range block_of(const Builder& builder, int position, Range within) {
    return within.shifted(static_cast<uint64_t>(builder.rank_at(position)) * builder.task().count);
}

}  // namespace

// The caller's input must not change, so partial sums travel through a work area of one block.
void build_ring_reduce_scatter(Builder& builder) {
    const int size = builder.size(), at = builder.position();
    const uint64_t count = builder.task().count;
    const Range whole{0, count};
    builder.algorithm("ring", "each element crosses each link once");
    builder.work(count);
    const int chunks = builder.chunks(count * static_cast<uint64_t>(size));
    for (int c = 0; c < chunks; ++c) {
        builder.chunk();
        const Range range = whole.part(c, chunks);
        for (int k = 0; k + 1 < size; ++k) {
            builder.round();
            builder.send(at + 1, k == 0 ? Buffer::input : Buffer::work,
                         k == 0 ? block_of(builder, at - 1, range) : range);
            builder.reduce(at - 1, Buffer::input, block_of(builder, at - 2 - k, range),
                           k + 2 == size ? Buffer::output : Buffer::work, range, true);
        }
        builder.finish_average(range);
    }
}

void build_ring_allgather(Builder& builder) {
    const int size = builder.size(), at = builder.position();
    const Range whole{0, builder.task().count};
    builder.algorithm("ring", "each element crosses each link once");
    const int chunks = builder.chunks(whole.size() * static_cast<uint64_t>(size));
    for (int c = 0; c < chunks; ++c) {
        builder.chunk();
        const Range range = whole.part(c, chunks);
        for (int k = 0; k + 1 < size; ++k) {
            builder.round();
            builder.send(at + 1, k == 0 ? Buffer::input : Buffer::output,
                         k == 0 ? range : block_of(builder, at - k, range));
            builder.receive(at - 1, Buffer::output, block_of(builder, at - 1 - k, range));
        }
        // Last, because the output must not be written before the calls are known to agree.
        builder.copy(Buffer::input, range, Buffer::output, block_of(builder, at, range));
    }
}

void build_direct_allgather(Builder& builder) {
    const int size = builder.size(), at = builder.position();
    const Range whole{0, builder.task().count};
    builder.algorithm("direct exchange", "few bytes: one round");
    for (int distance = 1; distance < size; ++distance) {
        builder.send(at + distance, Buffer::input, whole);
        builder.receive(at - distance, Buffer::output, block_of(builder, at - distance, whole));
    }
    builder.copy(Buffer::input, whole, Buffer::output, block_of(builder, at, whole));
}

}  // namespace ddl
