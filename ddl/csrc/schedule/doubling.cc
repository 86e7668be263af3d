// Small allreduces: recursive doubling (Thakur, Rabenseifner, Gropp, IJHPCA 2005, section 4.3.1). log2(n) rounds, each
// with the whole buffer; two more if n is not a power of two, for the ranks that are folded into their neighbours.
//
// Both ranks of a pair compute the same reduction, so both must put its operands in the same order: the lower
// position's first. An IEEE sum commutes except in a NaN's payload, and min and max in the sign of zero.
#include "schedule/builder.h"

namespace ddl {

void build_doubling(Builder& builder) {
    const int size = builder.size(), at = builder.position();
    const Range all{0, builder.task().count};
    int power = 1;
    while (power * 2 <= size) power *= 2;
    const int folded =
        size - power;  // of positions 0 .. 2 * folded - 1, each even one is folded into the odd one above
    builder.algorithm(folded == 0 ? "recursive doubling" : "recursive doubling with fold",
                      "few bytes: the fewest rounds");
    if (at < 2 * folded && at % 2 == 0) {
        builder.send(at + 1, Buffer::input, all);
        builder.round();
        builder.receive(at + 1, Buffer::output, all);
        return;
    }
    Buffer mine = Buffer::input;
    if (at < 2 * folded) {
        builder.reduce(at - 1, mine, all, Buffer::output, all, true);
        mine = Buffer::output;
    }
    // The positions that remain after the fold, renumbered in the same order.
    const auto old_of = [&](int renumbered) { return renumbered < folded ? 2 * renumbered + 1 : renumbered + folded; };
    const int renumbered = at < 2 * folded ? at / 2 : at - folded;
    for (int bit = 1; bit < power; bit *= 2) {
        builder.round();
        const int other = renumbered ^ bit;
        builder.send(old_of(other), mine, all);
        builder.reduce(old_of(other), mine, all, Buffer::output, all, other < renumbered);
        mine = Buffer::output;
    }
    builder.finish_average(all);
    if (at < 2 * folded) {
        builder.round();
        builder.send(at - 1, Buffer::output, all);
    }
}

}  // namespace ddl
