// Memory that several processes of a machine have: a file without a name, which is gone when the last of them has
// ended, in whatever way. It lies outside of /dev/shm, whose size containers limit.
//
// Pages are taken before they are used, with reserve(): a write to one for which there is no memory ends a process with
// SIGBUS. The file is sealed, so that nobody can make it shorter under another's feet.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

namespace ddl {

class SharedMemory {
  public:
    // All zeros. Throws Error(DDL_ERROR_UNSUPPORTED) with the reason, as all of these do.
    static std::unique_ptr<SharedMemory> create(size_t bytes);
    // Opens memory that another process of this user made, by its descriptor() there.
    static std::unique_ptr<SharedMemory> open(pid_t process, int descriptor, size_t bytes);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    void reserve(size_t offset, size_t bytes);
    // Nobody can open it from here any more, and nothing more can be reserved.
    void close_descriptor();

    std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    int descriptor() const { return descriptor_; }

  private:
    SharedMemory(int descriptor, size_t bytes) : descriptor_(descriptor), size_(bytes) {}
    void map();

    int descriptor_;
    const size_t size_;
    std::byte* data_ = nullptr;
};

}  // namespace ddl
