// Barrier by dissemination (Hensgen, Finkel, Manber 1988): after round k everyone has heard, directly or through
// others, from the 2^(k+1) - 1 ranks before it; ceil(log2 n) rounds.
#include "schedule/builder.h"

namespace ddl {

void disseminate(Builder& builder) {
    for (int distance = 1; distance < builder.size(); distance *= 2) {
        builder.round();
        builder.signal(builder.position() + distance);
        builder.await(builder.position() - distance);
    }
}

void build_barrier(Builder& builder) {
    builder.algorithm("dissemination", "the fewest rounds for any number of ranks");
    disseminate(builder);
}

}  // namespace ddl
