#include "allocation.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> passing{-1};  // allocations that still succeed; below 0: all do
std::atomic<int64_t> failing{0};   // and how many then fail
std::atomic<bool> failed{false};

void* allocate(size_t bytes, size_t alignment) {
    if (passing >= 0 && passing-- <= 0) {
        if (failing-- > 0) {
            passing = 0;
            failed = true;
            throw std::bad_alloc();
        }
        passing = -1;
    }
    void* const found = alignment <= alignof(std::max_align_t)
                            ? std::malloc(std::max<size_t>(bytes, 1))
                            : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!found) throw std::bad_alloc();
    return found;
}

}  // namespace

void fail_allocations(int64_t after, int64_t count) {
    failed = false;
    failing = count;
    passing = after;
}

bool stop_failing() {
    failing = 0;  // first: a thread that is in allocate() at this moment may still write `passing`
    passing = -1;
    return failed;
}

// Of the whole program.
void* operator new(size_t bytes) { return allocate(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
void* operator new[](size_t bytes) { return allocate(bytes, 1); }
void* operator new[](size_t bytes, std::align_val_t alignment) {
    return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    try {
        return allocate(bytes, 1);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void* operator new[](size_t bytes, const std::nothrow_t& nothrow) noexcept { return operator new(bytes, nothrow); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
