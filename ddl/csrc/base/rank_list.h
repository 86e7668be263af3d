// Ranks and numbers in words.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace ddl {

// "rank 3", or "ranks 1, 2, 3": the first eight, and how many more there are.
inline std::string name_list(const std::vector<int>& ranks) {
    constexpr size_t kShown = 8;
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
    return ranks.size() > kShown ? text + " and " + std::to_string(ranks.size() - kShown) + " more" : text;
}

// "1 host", "2 hosts".
inline std::string plural(size_t count, const char* word) {
    return std::to_string(count) + " " + word + (count == 1 ? "" : "s");
}

}  // namespace ddl
