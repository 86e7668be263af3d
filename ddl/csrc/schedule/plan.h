// Plans: the position of each rank in the machine, and how each dimension is reduced. Plain data.
//
// A rank has a *position* 0..N-1. Read in the mixed radix of the dimensions, innermost first, the position is the
// rank's coordinates: in 4x2 the positions 0..3 are the first host. Schedules use positions only; `ranks` maps them to
// ranks, so a bad order of hosts costs nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddl {

// The modes of a dimension: b and n are NCCL, r is our ring over the transport, m is MPI's collectives.
constexpr char kModes[] = "bnrm";

struct Plan {
    std::vector<int> dimensions;         // sizes, innermost first; at least one, each at least 1
    std::string modes;                   // a letter of kModes for each dimension
    int chunks = 0;                      // pieces that a large buffer is cut into; 0: by size
    uint64_t message_bytes = 0;          // about that of a message in the first dimension; 0: as Tuning says
    uint64_t small_bytes = 0;            // allreduces up to this size use recursive doubling; 0: as Tuning says
    std::vector<uint64_t> halved_above;  // their bytes are first halved once for each of these that they exceed
    std::vector<int> ranks;              // rank at each position
    std::vector<int> positions;          // position of each rank: the inverse
    std::string reason;                  // why this plan: one sentence

    int size() const { return static_cast<int>(ranks.size()); }

    // The distance of two positions that differ by one in `dimension`: the product of the dimensions inside it.
    int stride(size_t dimension) const;
    // The coordinate of `position` in `dimension`.
    int coordinate(int position, size_t dimension) const;
};

// One dimension over `size` ranks in rank order.
Plan flat_plan(int size, std::string reason = "one ring over all ranks");

// A plan of `dimensions` over `size` ranks. `modes` has one letter for all dimensions or one for each; `ranks` gives
// the rank at each position and may be empty for rank order. Throws Error(DDL_ERROR_ARGUMENT) if the dimensions do not
// multiply to `size` (naming both numbers), a mode is unknown, or `ranks` is not a permutation.
Plan make_plan(int size, std::vector<int> dimensions, const std::string& modes, std::vector<int> ranks = {},
               std::string reason = "as asked for");

// The same plan with `ranks` at its positions. Throws Error(DDL_ERROR_ARGUMENT) if `ranks` is not a permutation.
Plan reordered(Plan plan, std::vector<int> ranks);

// The plan for ranks on known hosts. `groups[k][r]` is the number of the group of level k (0: host, 1: rack, 2: aisle,
// ...) that rank r belongs to; each level's groups are made of whole groups of the level before. Ranks are ordered by
// group, then by rank. The first level whose groups differ in size, and all levels above it, are left out; if the hosts
// differ, the plan is one ring in host order. `reason` says so. Throws Error if the lengths differ or a group lies in
// two groups of the next level.
Plan plan_of_groups(const std::vector<std::vector<int>>& groups);

// The plan of `members`, a part of the ranks of `world`, by their numbers in the part. It keeps the world's order, and
// the world's groups as far as the part fills them evenly.
Plan plan_of_part(const Plan& world, const std::vector<int>& members);

// "bnrr:4x2x1x1"; a single letter if all dimensions have the same mode.
std::string format_mode(const Plan& plan);

}  // namespace ddl
