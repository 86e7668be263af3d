#include "piece.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace lms {
namespace {

// Both move all bytes or return an errno.
int write_all(int file, const char* from, std::size_t nbytes, std::uint64_t offset) {
    while (nbytes > 0) {
        const ssize_t done = pwrite(file, from, nbytes, static_cast<off_t>(offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done < 0 ? errno : EIO;
        from += done, offset += static_cast<std::uint64_t>(done), nbytes -= static_cast<std::size_t>(done);
    }
    return 0;
}

int read_all(int file, char* to, std::size_t nbytes, std::uint64_t offset) {
    while (nbytes > 0) {
        const ssize_t done = pread(file, to, nbytes, static_cast<off_t>(offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done < 0 ? errno : EIO;
        to += done, offset += static_cast<std::uint64_t>(done), nbytes -= static_cast<std::size_t>(done);
    }
    return 0;
}

}  // namespace

void die(const char* what, std::size_t nbytes, int error) {
    std::fprintf(stderr, "lms: error: %s: %zu bytes that were swapped out: %s\n", what, nbytes, std::strerror(error));
    std::abort();
}

bool Piece::allow(int access) const { return mprotect(address, nbytes, access) == 0; }

int Piece::write(const void* pages) const { return write_all(file, static_cast<const char*>(pages), nbytes, offset); }

bool Piece::unmap(bool reads) const {
    return mmap(address, nbytes, reads ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_FIXED | (reads ? 0 : MAP_ANONYMOUS),
                reads ? file : -1, reads ? static_cast<off_t>(offset) : 0) != MAP_FAILED;
}

void Piece::lift() {
#ifdef MREMAP_DONTUNMAP
    if (!allow(PROT_NONE)) return;
    // The addresses stay mapped, with no pages behind them. No thread sees those, because it has no access.
    void* const pages = mremap(address, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
    if (pages == MAP_FAILED) return;  // there are several mappings, or the system is older than Linux 5.7
    lifted = pages;
    if (mprotect(pages, nbytes, PROT_READ | PROT_WRITE) != 0) lay_back();
#endif
}

void Piece::lay_back() {
    void* const pages = std::exchange(lifted, nullptr);
    if (mremap(pages, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED) {
        die("mremap", nbytes, errno);
    }
}

bool Piece::fill(void* pages, bool& writable) const {
    if (const int error = read_all(file, static_cast<char*>(pages), nbytes, offset)) {
        die("reading the spill file failed", nbytes, error);
    }
    writable = writable || mprotect(pages, nbytes, PROT_READ) != 0;
    return mremap(pages, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) != MAP_FAILED;
}

}  // namespace lms
