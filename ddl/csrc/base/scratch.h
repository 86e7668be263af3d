// The engine's own memory, for messages that cannot go straight to or from a user's buffer. Blocks are kept for reuse.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace ddl {

class ScratchPool;

// A block of a pool. The destructor gives it back; the pool must live longer.
class Scratch {
  public:
    struct alignas(64) Line {
        std::byte bytes[64];
    };

    Scratch() = default;
    Scratch(Scratch&& other) noexcept;
    Scratch& operator=(Scratch&& other) noexcept;
    ~Scratch() { release(); }

    std::byte* data() const { return lines_ ? lines_[0].bytes : nullptr; }
    explicit operator bool() const { return lines_ != nullptr; }
    void release();
    // Leaks the block, for a transport that may still use it.
    void leave() noexcept { static_cast<void>(lines_.release()); }

  private:
    friend class ScratchPool;
    ScratchPool* pool_ = nullptr;
    std::unique_ptr<Line[]> lines_;
    unsigned power_ = 0;  // the block has 2^power_ lines
};

// Not thread-safe: the engine's progress lock guards it.
class ScratchPool {
  public:
    // `keep_bytes`: how much memory it keeps for reuse; blocks beyond that are freed when they come back.
    explicit ScratchPool(size_t keep_bytes = 256 << 20) : keep_bytes_(keep_bytes) {}

    // At least `bytes` bytes, aligned to 64, with any content. Throws std::bad_alloc.
    Scratch take(size_t bytes);

  private:
    friend class Scratch;
    void give(std::unique_ptr<Scratch::Line[]> lines, unsigned power);
    static size_t bytes_of(unsigned power) { return sizeof(Scratch::Line) << power; }

    const size_t keep_bytes_;
    size_t kept_bytes_ = 0;
    std::array<std::vector<std::unique_ptr<Scratch::Line[]>>, 58> free_;  // by power
};

}  // namespace ddl
