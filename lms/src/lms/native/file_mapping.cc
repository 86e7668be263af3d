// Storages whose memory is a file's: checkpoints that safetensors or `torch.load(mmap=True)` has read.

#include <ATen/MapAllocator.h>
#include <c10/core/StorageImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// Whether the storage's memory, or the storage that it is a slice of, is a file's mapping that writes do not reach the
// file through. `slice` is any slice of a storage: PyTorch has no other name for what such a one holds.
int lms_is_private_mapping(const c10::StorageImpl* storage, const c10::StorageImpl* slice) {
    while (storage->data_ptr().get_deleter() == slice->data_ptr().get_deleter()) {
        storage = static_cast<const c10::StorageImpl*>(storage->data_ptr().get_context());
    }
    const auto* mapping = at::MapAllocator::fromDataPtr(storage->data_ptr());
    return mapping != nullptr && (mapping->flags() & at::ALLOCATOR_MAPPED_SHARED) == 0 ? 1 : 0;
}

// Give back the whole pages of such memory. What was written to them is lost.
void lms_drop_mapped_pages(std::uintptr_t start, std::size_t nbytes) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t first = (start + page - 1) / page * page, last = (start + nbytes) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // extern "C"
