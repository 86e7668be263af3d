#include "schedule/plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/status.h"
#include "schedule/options.h"

namespace ddl {
namespace {

Error wrong(const std::string& message) { return Error(DDL_ERROR_ARGUMENT, message); }

std::vector<int> inverse_of(const std::vector<int>& ranks) {
    const auto size = static_cast<int>(ranks.size());
    std::vector<int> positions(ranks.size(), -1);
    for (int position = 0; position < size; ++position) {
        const int rank = ranks[static_cast<size_t>(position)];
        if (rank < 0 || rank >= size) {
            throw wrong("the order of ranks names rank " + std::to_string(rank) + ", but there are " +
                        std::to_string(size));
        }
        int& there = positions[static_cast<size_t>(rank)];
        if (there != -1) throw wrong("the order of ranks names rank " + std::to_string(rank) + " twice");
        there = position;
    }
    return positions;
}

std::string one_for_each(const std::string& modes, size_t dimensions) {
    for (const char mode : modes) {
        if (std::string(kModes).find(mode) == std::string::npos) {
            throw wrong(std::string("unknown mode '") + mode + "': a plan's dimension is reduced by b, n, r or m");
        }
    }
    if (modes.size() == 1) return std::string(dimensions, modes[0]);
    if (modes.size() == dimensions) return modes;
    throw wrong("modes '" + modes + "' are " + std::to_string(modes.size()) + " letters for " +
                std::to_string(dimensions) + " dimensions: give one letter for all, or one for each");
}

// The size of each group, by the groups' numbers.
std::vector<int> sizes_of(const std::vector<int>& groups) {
    std::map<int, int> counts;
    for (const int group : groups) ++counts[group];
    std::vector<int> sizes;
    for (const auto& [group, count] : counts) sizes.push_back(count);
    return sizes;
}

// "2, 2 and 1"; a long list is shortened.
std::string join(const std::vector<int>& numbers) {
    constexpr size_t kShown = 8;
    std::string text;
    for (size_t i = 0; i < numbers.size() && i < kShown; ++i) {
        const bool last = i + 1 == numbers.size();
        text += (i == 0 ? "" : last ? " and " : ", ") + std::to_string(numbers[i]);
    }
    return numbers.size() > kShown ? text + ", ..." : text;
}

// Each group of one level, mapped to its group of the next.
std::map<int, int> parents(const std::vector<int>& inner, const std::vector<int>& outer) {
    std::map<int, int> parent;
    for (size_t rank = 0; rank < inner.size(); ++rank) {
        const auto [found, added] = parent.emplace(inner[rank], outer[rank]);
        if (!added && found->second != outer[rank]) {
            throw wrong("group " + std::to_string(inner[rank]) + " lies in both group " +
                        std::to_string(found->second) + " and group " + std::to_string(outer[rank]) +
                        " of the next level");
        }
    }
    return parent;
}

}  // namespace

int Plan::stride(size_t dimension) const {
    return std::accumulate(dimensions.begin(), dimensions.begin() + static_cast<std::ptrdiff_t>(dimension), 1,
                           std::multiplies<>());
}

int Plan::coordinate(int position, size_t dimension) const {
    return position / stride(dimension) % dimensions[dimension];
}

Plan make_plan(int size, std::vector<int> dimensions, const std::string& modes, std::vector<int> ranks,
               std::string reason) {
    if (size < 1) throw wrong("a plan is for at least 1 rank, not " + std::to_string(size));
    if (dimensions.empty()) throw wrong("a plan needs at least one dimension");
    constexpr int64_t kMost = INT32_MAX;
    int64_t product = 1;
    for (const int dimension : dimensions) {
        if (dimension < 1) {
            throw wrong("dimensions " + format_dimensions(dimensions) + ": each must be at least 1");
        }
        product = std::min(product * dimension, kMost + 1);
    }
    if (product != size) {
        const std::string many = product > kMost ? "more than " + std::to_string(kMost) : std::to_string(product);
        throw wrong("dimensions " + format_dimensions(dimensions) + " multiply to " + many + ", but there are " +
                    std::to_string(size) + " ranks");
    }
    if (ranks.empty()) {
        ranks.resize(static_cast<size_t>(size));
        std::iota(ranks.begin(), ranks.end(), 0);
    }
    Plan plan;
    plan.modes = one_for_each(modes, dimensions.size());
    plan.dimensions = std::move(dimensions);
    plan.reason = std::move(reason);
    plan.ranks.resize(static_cast<size_t>(size));
    return reordered(std::move(plan), std::move(ranks));
}

Plan reordered(Plan plan, std::vector<int> ranks) {
    if (ranks.size() != plan.ranks.size()) {
        throw wrong("the order of ranks has " + std::to_string(ranks.size()) + " entries, but there are " +
                    std::to_string(plan.size()) + " ranks");
    }
    plan.positions = inverse_of(ranks);
    plan.ranks = std::move(ranks);
    return plan;
}

Plan flat_plan(int size, std::string reason) { return make_plan(size, {size}, "r", {}, std::move(reason)); }

Plan plan_of_groups(const std::vector<std::vector<int>>& groups) {
    if (groups.empty() || groups[0].empty()) throw wrong("no hosts: a plan is for at least 1 rank");
    const size_t size = groups[0].size();
    for (const auto& level : groups) {
        if (level.size() != size) {
            throw wrong("one level has groups for " + std::to_string(level.size()) + " ranks, another for " +
                        std::to_string(size));
        }
    }
    // The members of a level's groups are the groups of the level before; at first they are ranks.
    static const char* const kNames[][2] = {{"hosts", "ranks"}, {"racks", "hosts"}, {"aisles", "racks"}};
    std::vector<int> members(size);
    std::iota(members.begin(), members.end(), 0);
    std::vector<int> dimensions;
    std::string reason;
    size_t units = size;
    for (size_t level = 0; level < groups.size() && reason.empty(); ++level) {
        const auto parent = parents(members, groups[level]);
        std::vector<int> of_members;
        for (const auto& [member, group] : parent) of_members.push_back(group);
        const auto sizes = sizes_of(of_members);
        const bool named = level < std::size(kNames);
        const std::string outer = named ? kNames[level][0] : "groups of level " + std::to_string(level);
        const std::string inner = named ? kNames[level][1] : "groups";
        if (std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) != sizes.end()) {
            reason = outer + " are uneven: they have " + join(sizes) + " " + inner +
                     (level == 0 ? "; one ring over all ranks, in host order" : "; their level is left out");
        } else {
            dimensions.push_back(sizes[0]);
            units = sizes.size();
            members = groups[level];
        }
    }
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    // Outermost level first, even if the plan ends up flat: the ring then enters and leaves each group once.
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
        for (size_t level = groups.size(); level-- > 0;) {
            const int left = groups[level][static_cast<size_t>(a)], right = groups[level][static_cast<size_t>(b)];
            if (left != right) return left < right;
        }
        return false;
    });
    if (dimensions.empty()) {
        return make_plan(static_cast<int>(size), {static_cast<int>(size)}, "r", std::move(ranks), reason);
    }
    if (units > 1) dimensions.push_back(static_cast<int>(units));
    if (reason.empty()) reason = "the same number of ranks on each host, and of groups in each group";
    return make_plan(static_cast<int>(size), dimensions, "r", std::move(ranks), reason);
}

Plan plan_of_part(const Plan& world, const std::vector<int>& members) {
    const auto position = [&](int rank) {
        return world.positions[static_cast<size_t>(members[static_cast<size_t>(rank)])];
    };
    std::vector<int> order(members.size());  // the part's ranks, in the order of the world's plan
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return position(a) < position(b); });
    std::vector<std::vector<int>> groups;
    size_t units = members.size();  // of the level before
    for (size_t i = 1; i <= world.dimensions.size(); ++i) {
        std::vector<int> level;
        const int stride = i < world.dimensions.size() ? world.stride(i) : world.size();
        for (const int rank : order) level.push_back(position(rank) / stride);
        const size_t count = std::set<int>(level.begin(), level.end()).size();
        // Skip levels whose groups have one unit, and levels with one group: the plan has no dimension of size 1.
        if (count == units || (count == 1 && !groups.empty())) continue;
        units = count;
        groups.push_back(std::move(level));
    }
    if (groups.empty()) groups.emplace_back(members.size(), 0);
    Plan plan = plan_of_groups(groups);
    std::vector<int> ranks;
    for (const int rank : plan.ranks) ranks.push_back(order[static_cast<size_t>(rank)]);
    plan = reordered(std::move(plan), std::move(ranks));
    if (plan.size() == world.size()) {  // it was not measured for fewer ranks
        plan.message_bytes = world.message_bytes;
        plan.small_bytes = world.small_bytes;
        plan.halved_above = world.halved_above;
    }
    return plan;
}

std::string format_mode(const Plan& plan) {
    const bool same = plan.modes.find_first_not_of(plan.modes[0]) == std::string::npos;
    return (same ? plan.modes.substr(0, 1) : plan.modes) + ":" + format_dimensions(plan.dimensions);
}

}  // namespace ddl
