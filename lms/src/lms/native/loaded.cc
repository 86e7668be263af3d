// Storages that a checkpoint was loaded into. PyTorch forbids to resize them, as it does if NumPy refers to the memory.

#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// Whether the storage's memory, or the storage that it is a slice of, is a file's mapping that writes do not reach the
// file through: safetensors and `torch.load(mmap=True)` make such. `slice` is any slice of a storage: PyTorch has no
// other name for what such a one holds.
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

// Give back the whole pages of such memory. What was written to them is lost.
void lms_drop_mapped_pages(std::uintptr_t start, std::size_t nbytes) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t first = (start + page - 1) / page * page, last = (start + nbytes) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // extern "C"
