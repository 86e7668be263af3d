#include "scratch.h"

#include <new>
#include <utility>

namespace ddl {

Scratch::Scratch(Scratch&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      lines_(std::move(other.lines_)),
      count_(std::exchange(other.count_, 0)) {}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
    if (this != &other) {
        release();
        pool_ = std::exchange(other.pool_, nullptr);
        lines_ = std::move(other.lines_);
        count_ = std::exchange(other.count_, 0);
    }
    return *this;
}

void Scratch::release() {
    if (lines_) pool_->give(std::move(lines_), count_);
}

Scratch ScratchPool::take(size_t bytes) {
    size_t count = 2;
    while (count * sizeof(Scratch::Line) < bytes) count *= 2;
    Scratch scratch;
    scratch.pool_ = this;
    scratch.count_ = count;
    auto& free = free_[count];
    if (free.empty()) {
        scratch.lines_.reset(new Scratch::Line[count]);  // not make_unique, which would write zeros into all of it
    } else {
        scratch.lines_ = std::move(free.back());
        free.pop_back();
        kept_bytes_ -= count * sizeof(Scratch::Line);
    }
    return scratch;
}

void ScratchPool::give(std::unique_ptr<Scratch::Line[]> lines, size_t count) {
    const size_t bytes = count * sizeof(Scratch::Line);
    if (kept_bytes_ + bytes > keep_bytes_) return;
    try {
        free_[count].push_back(std::move(lines));
        kept_bytes_ += bytes;
    } catch (const std::bad_alloc&) {
        // A destructor's call: the block is freed, as if there were enough of them.
    }
}

}  // namespace ddl
