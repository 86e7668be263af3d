// Storages that a checkpoint was loaded into. PyTorch forbids to resize them, as it does if NumPy refers to the memory.

#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// Whether the memory is a private mapping of a file, or a slice of one: safetensors and `torch.load(mmap=True)` make
// such. `slice` is any slice: its deleter identifies slices, because PyTorch exports no name for it.
int lms_is_mapped(const c10::StorageImpl* storage, const c10::StorageImpl* slice) {
    while (storage->data_ptr().get_deleter() == slice->data_ptr().get_deleter()) {
        storage = static_cast<const c10::StorageImpl*>(storage->data_ptr().get_context());
    }
    const auto* mapping = at::MapAllocator::fromDataPtr(storage->data_ptr());
    return mapping != nullptr && (mapping->flags() & at::ALLOCATOR_MAPPED_SHARED) == 0 ? 1 : 0;
}

// Whether `torch.load` read a file into it: the memory is PyTorch's own, and yet the storage has no allocator.
int lms_is_read(const c10::StorageImpl* storage) {
    const c10::DeleterFnPtr deleter = storage->data_ptr().get_deleter();
    const bool own = deleter == c10::GetDefaultCPUAllocator()->raw_deleter() ||
                     deleter == c10::GetCPUAllocator()->raw_deleter();  // the pool's, once a session was open
    return own && storage->allocator() == nullptr ? 1 : 0;
}

// Give back the pages of such memory, except those that were written to: others may have the same memory.
void lms_drop_mapped_pages(std::uintptr_t start, std::size_t nbytes) {
    constexpr std::uint64_t kFile = 1ULL << 61, kPresent = 1ULL << 63;  // a written page is no longer the file's
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    for (std::uintptr_t at = start / page; at * page < start + nbytes;) {
        std::uint64_t pages[512];
        const ssize_t got = map < 0 ? 0 : pread(map, pages, sizeof pages, static_cast<off_t>(at * sizeof *pages));
        if (got <= 0) break;
        for (std::size_t i = 0; i < static_cast<std::size_t>(got) / sizeof *pages; ++i, ++at) {
            if (at * page >= start + nbytes || (pages[i] & kPresent) == 0 || (pages[i] & kFile) == 0) continue;
            madvise(reinterpret_cast<void*>(at * page), page, MADV_DONTNEED);
        }
    }
    if (map >= 0) close(map);
}

}  // extern "C"
