// float16 (IEEE 754 binary16) and bfloat16, held as their 16 bits.
//
// Conversions to float32 are exact; conversions from it round to nearest, ties to even. Subnormals are kept even if
// the calling thread flushes them (MXCSR's FTZ and DAZ, which new threads inherit). A NaN stays a NaN: it becomes quiet
// and keeps the upper bits of its payload, as the F16C instructions do, so that both implementations give equal bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ddl {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// These functions have no branches or tables, so that loops over them vectorise.
inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, mantissa = half & 0x03ffu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);  // 112: the difference of the exponents' biases
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f);
    const uint32_t special = 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x00400000u : 0u);
    uint32_t bits = magnitude < 0x0400u ? subnormal : normal;
    bits = magnitude >= 0x7c00u ? special : bits;
    return float_of(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

inline uint16_t float_to_half(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Below 2^-14 the adder rounds for us: 0.5 and a subnormal half have the same unit in the last place.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on, the nearest half is infinity
    half = magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x03ffu)) : half;
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

inline float bfloat_to_float(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

inline uint16_t float_to_bfloat(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x0040u : rounded);
}

// True if this CPU has the F16C and AVX instructions.
bool has_f16c();

// out[i] = a[i] + b[i] for `count` halves: each sum in float32, rounded once. `out` may be `a` or `b`.
// The F16C version may only be called if has_f16c().
void add_halves_portable(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count);
void add_halves_f16c(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count);
void add_halves(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count);

// The same for bfloat16. The AVX2 version may only be called if has_avx2().
bool has_avx2();
void add_bfloats_portable(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count);
void add_bfloats_avx2(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count);
void add_bfloats(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count);

}  // namespace ddl
