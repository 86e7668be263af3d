// Small allreduces: recursive doubling, after as many recursive halvings as the plan says (Thakur, Rabenseifner, Gropp,
// IJHPCA 2005, sections 4.3.1 and 4.4; as many halvings as doublings make it Rabenseifner's algorithm).
//
// In each of log2(n) rounds a rank meets the one whose position differs in one bit, the lowest first: inside hosts
// before between them. A halving leaves each of the two with one half of what they reduce, so that all later rounds
// carry half as much, and takes one more round at the end, in which they exchange the halves. If n is not a power of
// two, there are two rounds more, for the ranks that are folded into their neighbours.
//
// In a doubling both ranks compute the same reduction, so both must put its operands in the same order: the lower
// position's first. An IEEE sum commutes except in a NaN's payload, and min and max in the sign of zero.
#include "schedule/builder.h"

namespace ddl {

void build_doubling(Builder& builder, int halvings) {
    const int size = builder.size(), at = builder.position();
    const Range all{0, builder.task().count};
    int power = 1;
    while (power * 2 <= size) power *= 2;
    const int folded =
        size - power;  // of positions 0 .. 2 * folded - 1, each even one is folded into the odd one above
    builder.algorithm(std::string(halvings == 0 ? "recursive doubling" : "recursive halving and doubling") +
                          (folded == 0 ? "" : " with fold"),
                      halvings == 0
                          ? "few bytes: the fewest rounds"
                          : "few bytes: few rounds, " + std::to_string(halvings) + " of which halve the bytes");
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
    std::vector<Range> halves{all};  // what is still reduced after each halving
    for (int bit = 1, left = halvings; bit < power; bit *= 2, --left) {
        builder.round();
        const int other = renumbered ^ bit;
        const Range range = halves.back();
        const Range kept = left > 0 ? range.part(renumbered & bit ? 1 : 0, 2) : range;
        builder.send(old_of(other), mine, left > 0 ? range.part(other & bit ? 1 : 0, 2) : range);
        builder.reduce(old_of(other), mine, kept, Buffer::output, kept, other < renumbered);
        mine = Buffer::output;
        if (left > 0) halves.push_back(kept);
    }
    builder.finish_average(halves.back());
    for (int bit = 1 << (halves.size() - 1) >> 1; bit > 0; bit /= 2) {
        builder.round();
        const int other = renumbered ^ bit;
        builder.send(old_of(other), Buffer::output, halves.back());
        halves.pop_back();
        builder.receive(old_of(other), Buffer::output, halves.back().part(other & bit ? 1 : 0, 2));
    }
    if (at < 2 * folded) {
        builder.round();
        builder.send(at - 1, Buffer::output, all);
    }
}

}  // namespace ddl
