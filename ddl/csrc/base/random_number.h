// Random numbers that cannot be guessed, to recognise what belongs together.
#pragma once

#include <sys/random.h>

#include <cstdint>
#include <random>

namespace ddl {

// From the kernel. std::random_device is slower: each time it asks the processor what it can do, which takes a virtual
// machine some 50 us.
inline uint64_t random_number() {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) == static_cast<ssize_t>(sizeof number)) return number;
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace ddl
