// Broadcast. Positions are counted from the root: `v` is a rank's distance from it, in the plan's order.
//
// The tree is binomial: v's parent is v without its lowest set bit, and v's subtree is [v, v + lowest bit).
#include <algorithm>

#include "schedule/builder.h"

namespace ddl {
namespace {

struct Tree {
    explicit Tree(const Builder& builder)
        : size(builder.size()),
          root(builder.plan().positions[static_cast<size_t>(builder.task().root)]),
          at((builder.position() - root + size) % size) {}

    // The number of ranks in the subtree of `v`, itself included.
    int span(int v) const { return v == 0 ? size : std::min(v & -v, size - v); }
    int parent() const { return at - (at & -at); }
    // The children of this rank, the largest subtree first, because it takes longest.
    std::vector<int> children() const {
        std::vector<int> found;
        for (int bit = 1; bit < (at == 0 ? size : (at & -at)) && at + bit < size; bit *= 2) found.push_back(at + bit);
        std::reverse(found.begin(), found.end());
        return found;
    }
    int position(int v) const { return root + v; }

    int size, root, at;
};

}  // namespace

void build_tree_broadcast(Builder& builder) {
    const Tree tree(builder);
    const Range all{0, builder.task().count};
    builder.algorithm("binomial tree", "few bytes: the fewest rounds");
    if (tree.at != 0) builder.receive(tree.position(tree.parent()), Buffer::output, all);
    builder.round();
    for (const int child : tree.children()) builder.send(tree.position(child), Buffer::output, all);
}

// Each chunk is scattered over the ranks by the tree and gathered by a ring; chunks follow one another, so that the
// scatter of one overlaps the gather of others. The ring skips blocks that the receiver already has from the scatter,
// and the root, which has all.
void build_scatter_broadcast(Builder& builder) {
    const Tree tree(builder);
    const Range all{0, builder.task().count};
    builder.algorithm("scatter + allgather", "many bytes: each link carries the buffer about once");
    const auto holds = [&](int v, int part) { return part >= v && part < v + tree.span(v); };
    const int chunks = builder.chunks(all.size());
    for (int c = 0; c < chunks; ++c) {
        builder.chunk();
        const Range range = all.part(c, chunks);
        const auto part = [&](int index) { return range.part(index, tree.size); };
        const auto subtree = [&](int v) { return Range{part(v).begin, part(v + tree.span(v) - 1).end}; };
        if (tree.at != 0) builder.receive(tree.position(tree.parent()), Buffer::output, subtree(tree.at));
        builder.round();
        for (const int child : tree.children()) builder.send(tree.position(child), Buffer::output, subtree(child));
        const int next = tree.at + 1;
        for (int k = 0; k + 1 < tree.size; ++k) {
            builder.round();
            const int out = (tree.at - k + tree.size) % tree.size, in = (out - 1 + tree.size) % tree.size;
            if (next < tree.size && !holds(next, out)) builder.send(tree.position(next), Buffer::output, part(out));
            if (tree.at != 0 && !holds(tree.at, in)) {
                builder.receive(tree.position(tree.at - 1), Buffer::output, part(in));
            }
        }
    }
}

}  // namespace ddl
