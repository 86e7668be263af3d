#include "base/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define DDL_F16C __attribute__((target("avx,f16c")))
#define DDL_AVX2 __attribute__((target("avx2")))
#endif

namespace ddl {

void add_halves_portable(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) out[i] = float_to_half(half_to_float(a[i]) + half_to_float(b[i]));
}

void add_bfloats_portable(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) out[i] = float_to_bfloat(bfloat_to_float(a[i]) + bfloat_to_float(b[i]));
}

#if defined(__x86_64__)

// The same loop; the compiler makes it twice as wide.
DDL_AVX2 void add_bfloats_avx2(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) out[i] = float_to_bfloat(bfloat_to_float(a[i]) + bfloat_to_float(b[i]));
}

bool has_avx2() {
    static const bool found = __builtin_cpu_supports("avx2");
    return found;
}

bool has_f16c() {
    static const bool found = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
    return found;
}

namespace {

DDL_F16C inline __m256 load8(const uint16_t* in) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}

DDL_F16C inline void store8(uint16_t* out, __m256 values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace

DDL_F16C void add_halves_f16c(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {  // two at a time hide the conversions' latency
        const __m256 low = _mm256_add_ps(load8(a + i), load8(b + i));
        const __m256 high = _mm256_add_ps(load8(a + i + 8), load8(b + i + 8));
        store8(out + i, low);
        store8(out + i + 8, high);
    }
    for (; i < count; ++i) out[i] = float_to_half(half_to_float(a[i]) + half_to_float(b[i]));
}

#else  // neither on this architecture

bool has_avx2() { return false; }
void add_bfloats_avx2(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
    add_bfloats_portable(out, a, b, n);
}

bool has_f16c() { return false; }
void add_halves_f16c(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
    add_halves_portable(out, a, b, n);
}

#endif

void add_halves(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count) {
    if (has_f16c()) {
        add_halves_f16c(out, a, b, count);
    } else {
        add_halves_portable(out, a, b, count);
    }
}

void add_bfloats(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count) {
    if (has_avx2()) {
        add_bfloats_avx2(out, a, b, count);
    } else {
        add_bfloats_portable(out, a, b, count);
    }
}

}  // namespace ddl
