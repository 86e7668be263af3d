#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/status.h"

namespace ddl {
namespace {

constexpr char kName[] = "ddl-host";  // as /proc shows it
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, which headers of before Linux 6.3 do not have

Error failed(const std::string& what, int code) {
    return Error(DDL_ERROR_UNSUPPORTED, what + ": " + std::strerror(code));
}

int make_file() {
    // Newer kernels may be set to refuse what could be executed; older ones do not know the flag.
    const int file = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
    return file >= 0 || errno != EINVAL ? file : memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::create(size_t bytes) {
    // Beyond this limit a file does not only fail to grow: the process gets a signal that ends it.
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
        throw Error(DDL_ERROR_UNSUPPORTED, "a file of " + std::to_string(bytes) + " bytes is over the limit of " +
                                               std::to_string(limit.rlim_cur) + " (ulimit -f)");
    }
    const int file = make_file();
    if (file < 0) throw failed("memfd_create", errno);
    std::unique_ptr<SharedMemory> memory(new SharedMemory(file, bytes));
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) throw failed("ftruncate", errno);
    if (fcntl(file, F_ADD_SEALS, kSeals) != 0) throw failed("F_ADD_SEALS", errno);
    memory->map();
    return memory;
}

std::unique_ptr<SharedMemory> SharedMemory::open(pid_t process, int descriptor, size_t bytes) {
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
    // Looked at before it is opened: seen from another container, the number is another process's.
    char target[64] = "";
    if (readlink(path.c_str(), target, sizeof target - 1) < 0) throw failed(path, errno);
    if (std::strncmp(target, "/memfd:", 7) != 0 || std::strncmp(target + 7, kName, sizeof kName - 1) != 0) {
        throw Error(DDL_ERROR_UNSUPPORTED, path + " is another process's: do the ranks see different processes?");
    }
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) throw failed(path, errno);
    std::unique_ptr<SharedMemory> memory(new SharedMemory(file, bytes));
    struct stat found{};
    if (fstat(file, &found) != 0) throw failed("fstat", errno);
    const int seals = fcntl(file, F_GET_SEALS);
    if (static_cast<size_t>(found.st_size) != bytes || seals < 0 || (seals & kSeals) != kSeals) {
        throw Error(DDL_ERROR_UNSUPPORTED, path + " is not the memory that was offered");
    }
    memory->map();
    return memory;
}

SharedMemory::~SharedMemory() {
    if (data_) munmap(data_, size_);
    close_descriptor();
}

void SharedMemory::map() {
    void* const mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (mapped == MAP_FAILED) throw failed("mmap", errno);
    data_ = static_cast<std::byte*>(mapped);
    madvise(mapped, size_, MADV_DONTFORK);  // a child of a rank is none
}

void SharedMemory::reserve(size_t offset, size_t bytes) {
    for (;;) {
        if (fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0) return;
        if (errno != EINTR) throw failed("fallocate of " + std::to_string(bytes) + " bytes", errno);
    }
}

void SharedMemory::close_descriptor() {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = -1;
}

}  // namespace ddl
