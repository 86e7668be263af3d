// Alltoall: at distance k, everyone sends to the k-th rank after it and hears from the k-th before. Each distance is a
// chunk of its own, so several are in flight at once, and no rank is the target of all others at one time.
#include "schedule/builder.h"

namespace ddl {

void build_alltoall(Builder& builder) {
    const int size = builder.size(), at = builder.position();
    const Range whole{0, builder.task().count};
    const auto block = [&](int position) {
        return whole.shifted(static_cast<uint64_t>(builder.rank_at(position)) * whole.size());
    };
    builder.algorithm("pairwise exchange", "every byte has one sender and one receiver");
    for (int distance = 1; distance < size; ++distance) {
        builder.chunk();
        builder.send(at + distance, Buffer::input, block(at + distance));
        builder.receive(at - distance, Buffer::output, block(at - distance));
    }
    // The own block is copied in the last chunk, so that nothing is written before that chunk's pair has compared its
    // calls.
    builder.copy(Buffer::input, block(at), Buffer::output, block(at));
}

}  // namespace ddl
