#include "device/device.h"

#include <algorithm>

namespace ddl {
namespace {

// Eight sizes for each power of two: the chunks of a schedule get the same size, and at most an eighth is wasted.
size_t rounded(size_t bytes) {
    size_t unit = 4096;
    while (unit * 16 < bytes) unit *= 2;
    return std::max<size_t>(1, (bytes + unit - 1) / unit) * unit;
}

}  // namespace

Device::Staging Device::take(size_t bytes) {
    const size_t size = rounded(bytes);
    const auto found = std::find_if(kept_.rbegin(), kept_.rend(), [&](const Block& b) { return b.bytes == size; });
    if (found == kept_.rend()) {
        kept_.reserve(made_ + 1);  // give() needs no memory
        Staging made{allocate(size), Giver{this, size}};
        ++made_;
        return made;
    }
    std::byte* const block = found->memory;
    kept_.erase(std::prev(found.base()));
    kept_bytes_ -= size;
    return {block, Giver{this, size}};
}

void Device::give(std::byte* block, size_t bytes) noexcept {
    kept_.push_back({block, bytes});
    kept_bytes_ += bytes;
    while (kept_bytes_ > kKeepBytes) {
        // Release the block that was unused for the longest time, not the one used now.
        release(kept_.front().memory);
        kept_bytes_ -= kept_.front().bytes;
        kept_.erase(kept_.begin());
        --made_;
    }
}

void Device::clear() noexcept {
    for (const Block& block : kept_) release(block.memory);
    kept_.clear();
    kept_bytes_ = 0;
}

}  // namespace ddl
