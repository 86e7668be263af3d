// A range of elements, and how ranks divide it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ddl {

// Elements [begin, end) of a buffer.
struct Range {
    uint64_t begin = 0, end = 0;
    uint64_t size() const { return end - begin; }
    // Part `index` of `parts` nearly equal parts; every rank divides alike.
    Range part(int index, int parts) const {
        // Not size() * index / parts, which overflows for large buffers.
        const auto n = static_cast<uint64_t>(parts), i = static_cast<uint64_t>(index);
        const uint64_t each = size() / n, rest = size() % n;
        const auto at = [&](uint64_t k) { return begin + each * k + std::min(k, rest); };
        return {at(i), at(i + 1)};
    }
    Range shifted(uint64_t by) const { return {begin + by, end + by}; }
};

}  // namespace ddl
