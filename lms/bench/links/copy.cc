// A loop of memcpy, timed: what `lms link measure` must be as fast as.
// Arguments: bytes of one copy, copies. Prints the seconds of each copy, one a line.

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

void* Pages(size_t nbytes) {
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("mmap");
        std::exit(1);
    }
    madvise(memory, nbytes, MADV_HUGEPAGE);
    return memory;
}

}  // namespace

int main(int count, char** words) {
    if (count != 3) {
        std::fprintf(stderr, "usage: copy BYTES COPIES\n");
        return 2;
    }
    const size_t nbytes = std::strtoull(words[1], nullptr, 10);
    const long copies = std::strtol(words[2], nullptr, 10);
    char* source = static_cast<char*>(Pages(nbytes));
    char* target = static_cast<char*>(Pages(nbytes));
    std::memset(source, 1, nbytes);
    std::memset(target, 2, nbytes);
    std::memcpy(target, source, nbytes);  // warms up
    for (long at = 0; at < copies; ++at) {
        source[at % nbytes] ^= 1;  // so that no compiler finds the copies equal
        const auto start = std::chrono::steady_clock::now();
        std::memcpy(target, source, nbytes);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        std::printf("%.9f\n", took.count());
        if (target[at % nbytes] != source[at % nbytes]) return 1;
    }
    return 0;
}
