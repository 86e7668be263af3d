#include "base/scratch.h"

#include <new>
#include <utility>

namespace ddl {

Scratch::Scratch(Scratch&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), lines_(std::move(other.lines_)), power_(other.power_) {}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
    if (this != &other) {
        release();
        pool_ = std::exchange(other.pool_, nullptr);
        lines_ = std::move(other.lines_);
        power_ = other.power_;
    }
    return *this;
}

void Scratch::release() {
    if (lines_) pool_->give(std::move(lines_), power_);
}

Scratch ScratchPool::take(size_t bytes) {
    unsigned power = 1;
    while (power + 1 < free_.size() && bytes_of(power) < bytes) ++power;
    Scratch scratch;
    scratch.pool_ = this;
    scratch.power_ = power;
    auto& free = free_[power];
    if (free.empty()) {
        // Not make_unique, which would write zeros into all of it.
        scratch.lines_.reset(new Scratch::Line[size_t{1} << power]);
    } else {
        scratch.lines_ = std::move(free.back());
        free.pop_back();
        kept_bytes_ -= bytes_of(power);
    }
    return scratch;
}

void ScratchPool::give(std::unique_ptr<Scratch::Line[]> lines, unsigned power) {
    const size_t bytes = bytes_of(power);
    if (kept_bytes_ + bytes > keep_bytes_) return;
    try {
        free_[power].push_back(std::move(lines));
        kept_bytes_ += bytes;
    } catch (const std::bad_alloc&) {
        // Called by a destructor, so it must not throw: the block is freed.
    }
}

}  // namespace ddl
