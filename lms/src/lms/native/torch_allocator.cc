// PyTorch's CPU allocator over a PagePool, and the C functions by which Python reaches it and its Pager.
//
// Blocks of kLeast bytes and more come from the pool: tensors, and the scratch memory that operations ask for. Smaller
// ones come from PyTorch's own allocator. Once installed it stays: memory that it handed out needs it to be freed.

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

#include "page_pool.h"
#include "pager.h"

namespace {

constexpr std::size_t kLeast = 64 << 10;    // bytes; a block of its own wastes half a page, here 3% at most
constexpr std::uintptr_t kPageMask = 4095;  // of the smallest page there is
constexpr std::uint8_t kPriority = 255;     // above every other allocator's

// Never destroyed: tensors may be freed later than anything that has a destructor.
lms::PagePool& pool() {
    static auto* const pool = new lms::PagePool;
    return *pool;
}

lms::Pager& pager() {
    static auto* const pager = new lms::Pager(pool());
    return *pager;
}

std::atomic<bool> active{false};
std::atomic<bool> paging{false};  // set when the first block is tracked

void release(void* block) {
    // The pool's blocks begin on a page, nearly all others do not and need no look into it.
    if (block == nullptr) return;
    const bool on_page = (reinterpret_cast<std::uintptr_t>(block) & kPageMask) == 0;
    const bool whole = on_page && paging && pager().forget(static_cast<char*>(block));
    if (on_page && pool().free(block, whole)) {
        c10::profiledCPUMemoryReporter().Delete(block);
        return;
    }
    c10::GetDefaultCPUAllocator()->raw_deallocate(block);
}

class PoolAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(std::size_t nbytes) override {
        const bool ours = nbytes >= kLeast && active.load(std::memory_order_relaxed);
        if (ours && paging) pager().yield(nbytes);
        void* block = ours ? pool().allocate(nbytes) : nullptr;
        if (block != nullptr) {
            c10::profiledCPUMemoryReporter().New(block, nbytes);
        } else {
            // If the pool has none, the C library may: it keeps free memory, too. If not, the error is the usual one.
            block = c10::GetDefaultCPUAllocator()->raw_allocate(nbytes);
        }
        return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void* to, const void* from, std::size_t nbytes) const override {
        default_copy_data(to, from, nbytes);
    }
};

}  // namespace

extern "C" {

void lms_pool_retire();

// Make the pool PyTorch's CPU allocator, without a bound on what it keeps; 0, or 1 when another allocator stays.
int lms_pool_install() {
    static auto* const allocator = [] {
        // The idle pages are the parent's. A child that kept them would keep what was in them, each page a second time
        // as soon as the parent has written to it.
        pthread_atfork(
            [] {
                pager().before_fork();
                pool().lock();
            },
            [] {
                pool().unlock();
                pager().after_fork();
            },
            [] {
                pool().unlock();
                pager().in_child();
                lms_pool_retire();
            });
        return new PoolAllocator;
    }();
    c10::SetCPUAllocator(allocator, kPriority);
    pool().keep(std::numeric_limits<std::size_t>::max());
    active = c10::GetCPUAllocator() == allocator;
    return active ? 0 : 1;
}

int lms_pool_active() { return active ? 1 : 0; }

// New blocks come from PyTorch's own allocator from now on; the idle pages go back to the system.
void lms_pool_retire() {
    active = false;
    pool().keep(0);
}

void lms_pool_keep(std::size_t nbytes) {
    pool().keep(nbytes);
    if (paging) pager().wake();
}

void lms_pool_reset_peak() { pool().reset_peak(); }

// Figures in the order of PoolUsage.
void lms_pool_usage(std::uint64_t figures[8]) {
    const lms::PoolUsage usage = pool().usage();
    const std::uint64_t all[] = {usage.used,  usage.used_peak, usage.idle,     usage.peak,
                                 usage.fresh, usage.returned,  usage.stitched, usage.paged};
    std::copy(std::begin(all), std::end(all), figures);
}

// The pager: see pager.h.
void lms_pager_start() { pager().start(); }
void lms_pager_stop() { pager().stop(); }
std::uint32_t lms_pager_number(std::uint32_t count) { return pager().number(count); }
int lms_pager_track(std::uint32_t first, void* address, int file, std::uint64_t offset, std::size_t room,
                    int transient) {
    paging = true;
    return pager().track(first, static_cast<char*>(address), file, offset, room, transient != 0) ? 1 : 0;
}
void lms_pager_keep(std::size_t nbytes, int fills) { pager().keep(nbytes, fills != 0); }
void lms_pager_expect(const std::uint32_t* pieces, const std::uint32_t* positions, std::size_t count) {
    pager().expect(pieces, positions, count);
}
void lms_pager_reach(std::uint32_t position) { pager().reach(position); }
void lms_pager_release(int file) { pager().release(file); }
void lms_pager_let_read(int begins) { pager().let_read(begins != 0); }
void lms_pager_take_faults() { pager().take_faults(); }
void lms_pager_leave_faults() { pager().leave_faults(); }

// Figures in the order of PagerUsage. With `anew` a failed write is told once.
void lms_pager_usage(std::uint64_t figures[6], int anew) {
    const lms::PagerUsage usage = pager().usage(anew != 0);
    const std::uint64_t all[] = {usage.tracked, usage.resident, usage.out, usage.back, usage.waited, usage.failed};
    std::copy(std::begin(all), std::end(all), figures);
}

// For tests, which have no tensor of a given address.
void* lms_pool_allocate(std::size_t nbytes) { return pool().allocate(nbytes); }
int lms_pool_free(void* block) { return pool().free(block) ? 1 : 0; }

}  // extern "C"
