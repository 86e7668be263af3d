// Allreduce in N dimensions: Cho et al., BlueConnect, MLSys 2019 (arXiv:1708.02188).
//
// In dimension i the ranks that differ only in coordinate i form a ring of d. The reduce-scatter leaves each with one
// d-th of what they shared, so dimension i + 1 carries a d-th of the bytes. A rank sends and receives
// 2 (d_i - 1) / d_i x S / (d_1 ... d_(i-1)) bytes in dimension i, in 2 (d_i - 1) rounds.
//
// Each element is reduced along one chain of ranks and then copied: every rank has the same bits by construction.
#include "builder.h"
#include "options.h"

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
    std::vector<Range> shared(dimensions);  // what the ring of each dimension has in common
    // Nothing is copied to the output beforehand: the first ring that touches an element reads it from the input.
    Buffer mine = Buffer::input;
    for (size_t i = 0; i < dimensions; ++i) {
        const Ring ring(builder, i);
        shared[i] = range;
        for (int k = 0; k + 1 < ring.size; ++k) {  // round k sends what round k - 1 reduced; the last part is mine
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
        for (int k = 0; k + 1 < ring.size; ++k) {
            builder.round();
            builder.send(ring.next, Buffer::output, shared[i].part(ring.part(k), ring.size));
            builder.receive(ring.previous, Buffer::output, shared[i].part(ring.part(k + 1), ring.size));
        }
    }
}

}  // namespace

void build_hierarchy(Builder& builder) {
    const Range all{0, builder.task().count};
    const bool flat = builder.plan().dimensions.size() == 1;
    builder.algorithm(flat ? "flat ring" : "hierarchy " + format_dimensions(builder.plan().dimensions),
                      builder.plan().reason);
    const int chunks = builder.chunks(all.size());
    for (int c = 0; c < chunks; ++c) {
        builder.chunk();
        build_chunk(builder, all.part(c, chunks));
    }
}

}  // namespace ddl
