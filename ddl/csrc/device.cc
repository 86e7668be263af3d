#include "device.h"

namespace ddl {

Device::Staging Device::take(size_t bytes) {
    size_t size = 4096;
    while (size < bytes) size *= 2;
    auto& blocks = free_[size];
    if (blocks.empty()) return {allocate(size), Giver{this, size}};
    std::byte* block = blocks.back();
    blocks.pop_back();
    kept_bytes_ -= size;
    return {block, Giver{this, size}};
}

void Device::give(std::byte* block, size_t bytes) {
    if (kept_bytes_ + bytes > kKeepBytes) return release(block);
    kept_bytes_ += bytes;
    free_[bytes].push_back(block);
}

void Device::clear() noexcept {
    for (auto& [size, blocks] : free_) {
        for (std::byte* block : blocks) release(block);
    }
    free_.clear();
    kept_bytes_ = 0;
}

}  // namespace ddl
