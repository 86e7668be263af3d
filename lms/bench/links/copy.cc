// A loop of memcpy, timed: what `lms link measure` must be as fast as. Compiled by g++ -O2 -shared.
#include <chrono>
#include <cstddef>
#include <cstring>

// Copies `nbytes` so many times and stores the seconds of each copy. Returns 1 if a copy did not arrive, else 0.
extern "C" int copy_times(char* target, char* source, size_t nbytes, size_t copies, double* seconds) {
    for (size_t at = 0; at < copies; ++at) {
        source[at % nbytes] ^= 1;  // so that no compiler finds the copies equal
        const auto start = std::chrono::steady_clock::now();
        std::memcpy(target, source, nbytes);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        seconds[at] = took.count();
        if (target[at % nbytes] != source[at % nbytes]) return 1;
    }
    return 0;
}
