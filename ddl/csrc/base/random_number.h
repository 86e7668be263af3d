// Random numbers that cannot be guessed, to recognise what belongs together.
#pragma once

#include <cstdint>
#include <random>

namespace ddl {

inline uint64_t random_number() {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace ddl
