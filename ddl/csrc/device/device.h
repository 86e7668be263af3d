// A device with memory of its own, as the engine needs it: pinned host memory, and asynchronous copies to and from it.
// CUDA implements it, and so do tests.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace ddl {

// A fence: a point in the work that a caller has given to the device.
class Fence {
  public:
    virtual ~Fence() = default;
    // True when the device has reached it. Throws Error.
    virtual bool passed() = 0;
};

// Not thread-safe: the engine's progress lock guards it. Functions throw Error(DDL_ERROR_TRANSPORT) if the device
// fails, and std::bad_alloc.
class Device {
  public:
    struct Giver {
        Device* device = nullptr;
        size_t bytes = 0;
        void operator()(std::byte* block) const { device->give(block, bytes); }
    };
    // A block of host memory, which returns to its device; the device must live longer.
    using Staging = std::unique_ptr<std::byte, Giver>;

    virtual ~Device() = default;

    // At least `bytes` bytes of pinned host memory, aligned to 64, with any content. Blocks are kept for reuse, because
    // allocating or freeing one may wait for all work of the device.
    Staging take(size_t bytes);

    // Begins a copy from device memory to host memory of take(), or the other way.
    virtual Ticket copy(void* to, const void* from, size_t bytes, bool to_device) = 0;
    // True when the copy is complete, which ends the ticket.
    virtual bool test(Ticket ticket) = 0;
    // Waits for the copy and ends the ticket; a copy does not wait for other ranks. Throws nothing.
    virtual void finish(Ticket ticket) noexcept = 0;

  protected:
    virtual std::byte* allocate(size_t bytes) = 0;
    virtual void release(std::byte* block) noexcept = 0;
    // For destructors: releases all blocks that are kept.
    void clear() noexcept;

  private:
    struct Block {
        std::byte* memory = nullptr;
        size_t bytes = 0;
    };

    void give(std::byte* block, size_t bytes) noexcept;

    // The most that a communicator's operations stage, four at once: so blocks in regular use are never freed.
    static constexpr size_t kKeepBytes = size_t{1} << 30;
    size_t made_ = 0;  // all blocks, in use or kept
    size_t kept_bytes_ = 0;
    std::vector<Block> kept_;  // the last returned ones at the end
};

}  // namespace ddl
