#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "base/types.h"
#include "check.h"

using namespace ddl;

namespace {

// Rounds to nearest even by arithmetic on doubles, which no conversion of ours shares a line with.
uint16_t rounded_half(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
    const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
    const double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // the mode is nearest even
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(((exponent + 14) << 10) + static_cast<int>(units)));
}

std::vector<uint16_t> every_half() {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    return all;
}

// Floats around every rounding boundary, special ones and random bits.
std::vector<float> many_floats() {
    std::mt19937_64 random(check::seed());
    std::vector<float> all;
    for (const uint16_t half : every_half()) {
        const float value = half_to_float(half);
        const uint32_t bits = bits_of(value);
        for (const uint32_t add : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu}) all.push_back(float_of(bits + add));
    }
    for (int i = 0; i < 200000; ++i) all.push_back(float_of(static_cast<uint32_t>(random())));
    return all;
}

template <typename T>
T apply(DataType type, ReduceOp op, T a, T b) {
    T out{};
    combine(&out, &a, &b, 1, type, op);
    return out;
}

}  // namespace

TEST("every half survives the way to float and back, NaNs as quiet ones") {
    for (const uint16_t half : every_half()) {
        const bool nan = (half & 0x7c00) == 0x7c00 && (half & 0x3ff) != 0;
        const uint16_t expected = nan ? static_cast<uint16_t>(half | 0x0200) : half;
        CHECK_EQ(float_to_half(half_to_float(half)), expected);
    }
    CHECK_EQ(half_to_float(0x0001), 0x1p-24f);
    CHECK_EQ(half_to_float(0x7bff), 65504.0f);
    CHECK_EQ(half_to_float(0xfc00), -std::numeric_limits<float>::infinity());
}

TEST("floats are rounded to the nearest half, ties to even") {
    for (const float value : many_floats()) {
        if (!std::isnan(value)) CHECK_EQ(float_to_half(value), rounded_half(value));
    }
    CHECK_EQ(float_to_half(65519.996f), 0x7bff);
    CHECK_EQ(float_to_half(65520.0f), 0x7c00);
    CHECK_EQ(float_to_half(0x1p-25f), 0);         // a tie between 0 and the least subnormal
    CHECK_EQ(float_to_half(0x1.8p-24f), 0x0002);  // a tie between subnormals
}

TEST("the F16C and the portable sums of halves give the same bits") {
    if (!has_f16c()) return;
    std::mt19937_64 random(check::seed());
    std::vector<uint16_t> a(100003), b(a.size()), fast(a.size()), slow(a.size());
    for (size_t i = 0; i < a.size(); ++i) {
        a[i] = static_cast<uint16_t>(random());
        b[i] = static_cast<uint16_t>(random());
        // Two NaNs: which payload is kept is the compiler's choice, the same for every rank of one build.
        if ((a[i] & 0x7fff) > 0x7c00 && (b[i] & 0x7fff) > 0x7c00) b[i] = 0;
    }
    add_halves_f16c(fast.data(), a.data(), b.data(), a.size());
    add_halves_portable(slow.data(), a.data(), b.data(), a.size());
    CHECK(fast == slow);
    // Every half with nothing, which changes none but -0.
    const std::vector<uint16_t> halves = every_half(), zeros(halves.size());
    std::vector<uint16_t> sums(halves.size()), portable(halves.size());
    add_halves_f16c(sums.data(), halves.data(), zeros.data(), halves.size());
    add_halves_portable(portable.data(), halves.data(), zeros.data(), halves.size());
    CHECK(sums == portable);
}

TEST("the AVX2 and the portable sums of bfloat16 give the same bits") {
    if (!has_avx2()) return;
    std::mt19937_64 random(check::seed());
    std::vector<uint16_t> a(100003), b(a.size()), fast(a.size()), slow(a.size());
    for (size_t i = 0; i < a.size(); ++i) {
        a[i] = static_cast<uint16_t>(random());
        b[i] = static_cast<uint16_t>(random());
        if ((a[i] & 0x7fff) > 0x7f80 && (b[i] & 0x7fff) > 0x7f80) b[i] = 0;
    }
    add_bfloats_avx2(fast.data(), a.data(), b.data(), a.size());
    add_bfloats_portable(slow.data(), a.data(), b.data(), a.size());
    CHECK(fast == slow);
}

TEST("bfloat16 rounds to nearest even and keeps NaN and infinity") {
    CHECK_EQ(float_to_bfloat(1.0f), 0x3f80);
    CHECK_EQ(float_to_bfloat(float_of(0x3f808000)), 0x3f80);  // a tie: down to even
    CHECK_EQ(float_to_bfloat(float_of(0x3f818000)), 0x3f82);  // a tie: up to even
    CHECK_EQ(float_to_bfloat(float_of(0x3f808001)), 0x3f81);
    CHECK_EQ(float_to_bfloat(float_of(0x7f7fffff)), 0x7f80);  // rounds up to infinity
    CHECK_EQ(float_to_bfloat(float_of(0xff800000)), 0xff80);
    CHECK_EQ(float_to_bfloat(float_of(0x7f800001)), 0x7fc0);  // a NaN whose payload is cut off
    CHECK_EQ(float_to_bfloat(float_of(0x00000001)), 0);
}

TEST("a sum of halves is rounded after each addition") {
    const uint16_t big = float_to_half(2048), one = float_to_half(1);
    CHECK_EQ(half_to_float(apply(DDL_FLOAT16, DDL_SUM, big, one)), 2048.0f);  // 2049 is not a half
    CHECK_EQ(half_to_float(apply(DDL_FLOAT16, DDL_SUM, float_to_half(60000), float_to_half(60000))),
             std::numeric_limits<float>::infinity());
}

TEST("integers wrap around, and average divides towards zero") {
    CHECK_EQ(apply<int8_t>(DDL_INT8, DDL_SUM, 127, 1), -128);
    CHECK_EQ(apply<uint8_t>(DDL_UINT8, DDL_PRODUCT, 16, 17), 16);
    CHECK_EQ(apply<int32_t>(DDL_INT32, DDL_SUM, INT32_MAX, 1), INT32_MIN);
    CHECK_EQ(apply<int64_t>(DDL_INT64, DDL_PRODUCT, INT64_MIN, -1), INT64_MIN);
    int32_t values[] = {7, -7, 6, 0};
    divide(values, 4, DDL_INT32, 2);
    CHECK_EQ(values[0], 3);
    CHECK_EQ(values[1], -3);
    CHECK_EQ(values[2], 3);
    int8_t small = 100;
    divide(&small, 1, DDL_INT8, 300);  // a divisor that is not an int8
    CHECK_EQ(small, 0);
}

TEST("min and max give NaN where either operand is NaN") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const ReduceOp op : {DDL_MIN, DDL_MAX}) {
        CHECK(std::isnan(apply(DDL_FLOAT32, op, nan, 1.0f)));
        CHECK(std::isnan(apply(DDL_FLOAT32, op, 1.0f, nan)));
    }
    CHECK_EQ(apply(DDL_FLOAT64, DDL_MIN, 2.0, -3.0), -3.0);
    CHECK_EQ(apply<uint8_t>(DDL_UINT8, DDL_MAX, 200, 100), 200);
}

TEST("out may be either operand, and the bits are those of three arrays") {
    std::mt19937_64 random(check::seed());
    for (int t = DDL_FLOAT16; t <= DDL_UINT8; ++t) {
        for (int o = DDL_SUM; o <= DDL_PRODUCT; ++o) {
            const auto type = static_cast<DataType>(t);
            const auto op = static_cast<ReduceOp>(o);
            const size_t count = 67;
            // Random bits: NaNs, infinities and subnormals are among them.
            std::array<std::array<uint64_t, 67>, 4> v{};
            for (size_t i = 0; i < count; ++i) v[0][i] = random(), v[1][i] = random();
            combine(v[2].data(), v[0].data(), v[1].data(), count, type, op);
            v[3] = v[0];
            combine(v[3].data(), v[3].data(), v[1].data(), count, type, op);
            CHECK_EQ(std::memcmp(v[3].data(), v[2].data(), count * size_of(type)), 0);
            v[3] = v[1];
            combine(v[3].data(), v[0].data(), v[3].data(), count, type, op);
            CHECK_EQ(std::memcmp(v[3].data(), v[2].data(), count * size_of(type)), 0);
        }
    }
}
