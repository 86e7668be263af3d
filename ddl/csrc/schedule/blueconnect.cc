// Allreduce in N dimensions: Cho et al., BlueConnect, MLSys 2019 (arXiv:1708.02188).
//
// In dimension i the ranks that differ only in coordinate i form a ring of size d. The reduce-scatter leaves each with
// one d-th of the bytes, so dimension i + 1 carries a d-th of them. A rank sends and receives 2 (d_i - 1) / d_i x S /
// (d_1 ... d_(i-1)) bytes in dimension i, in 2 (d_i - 1) rounds.
//
// If MPI or NCCL reduces a dimension, their reduce-scatter and allgather replace its ring, over the same parts.
//
// Each element is reduced on one chain of ranks, or by one rank's reduce-scatter, and then copied: every rank has the
// same bits by construction.
#include "schedule/builder.h"
#include "schedule/options.h"

namespace ddl {
namespace {

int wrap(int value, int size) { return (value % size + size) % size; }

// The ring through this rank in one dimension.
struct Ring {
    Ring(const Builder& builder, size_t dimension)
        : size(builder.plan().dimensions[dimension]), at(builder.plan().coordinate(builder.position(), dimension)) {
        const int stride = builder.plan().stride(dimension);
        const int origin = builder.position() - at * stride;
        next = origin + wrap(at + 1, size) * stride;
        previous = origin + wrap(at - 1, size) * stride;
    }
    int part(int steps_back) const { return wrap(at - steps_back, size); }

    int size, at, next, previous;
};

void build_chunk(Builder& builder, Range range) {
    const size_t dimensions = builder.plan().dimensions.size();
    std::vector<Range> shared(dimensions);  // the range that the ring of each dimension shares
    // Nothing is copied to the output beforehand: the first ring that touches an element reads it from the input.
    Buffer mine = Buffer::input;
    for (size_t i = 0; i < dimensions; ++i) {
        const Ring ring(builder, i);
        shared[i] = range;
        if (builder.is_grouped(i)) builder.reduce_scatter(i, mine, range);
        for (int k = 0; k + 1 < ring.size && !builder.is_grouped(i); ++k) {
            // Round k sends what round k - 1 reduced; the last part is mine.
            builder.round();
            const Range in = range.part(ring.part(k + 2), ring.size);
            builder.send(ring.next, k == 0 ? mine : Buffer::output, range.part(ring.part(k + 1), ring.size));
            builder.reduce(ring.previous, mine, in, Buffer::output, in, true);
        }
        if (ring.size > 1) mine = Buffer::output;
        range = range.part(ring.at, ring.size);
    }
    builder.finish_average(range);
    for (size_t i = dimensions; i-- > 0;) {
        const Ring ring(builder, i);
        if (builder.is_grouped(i)) builder.allgather(i, shared[i]);
        for (int k = 0; k + 1 < ring.size && !builder.is_grouped(i); ++k) {
            builder.round();
            builder.send(ring.next, Buffer::output, shared[i].part(ring.part(k), ring.size));
            builder.receive(ring.previous, Buffer::output, shared[i].part(ring.part(k + 1), ring.size));
        }
    }
}

}  // namespace

void build_hierarchy(Builder& builder) {
    const Range all{0, builder.task().count};
    const size_t dimensions = builder.plan().dimensions.size();
    std::string modes;
    bool grouped = false;
    for (size_t i = 0; i < dimensions; ++i) {
        modes += mode_of(builder.plan(), i, builder.task());
        grouped |= builder.is_grouped(i);
    }
    const std::string shape = format_dimensions(builder.plan().dimensions);
    builder.algorithm(grouped           ? "hierarchy " + modes + ":" + shape
                      : dimensions == 1 ? "flat ring"
                                        : "hierarchy " + shape,
                      builder.plan().reason);
    if (all.size() == 0) return;
    // The ranks first compare their calls, because the collectives of MPI and NCCL do not.
    if (grouped) disseminate(builder);
    const int chunks = builder.chunks(all.size());
    for (int c = 0; c < chunks; ++c) {
        builder.chunk();
        build_chunk(builder, all.part(c, chunks));
    }
}

}  // namespace ddl
