#include "base/types.h"

#include <type_traits>

#include "base/half.h"
#include "base/status.h"

namespace ddl {
namespace {

// Integers are added and multiplied as unsigned, because wrapping is defined for these.
template <typename T, bool = std::is_integral_v<T>>
struct Wrapping {
    using type = T;
};
template <typename T>
struct Wrapping<T, true> {
    // At least 32 bits wide: a narrower type would be promoted to a *signed* int, whose product may overflow.
    using type = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
};

struct Add {
    template <typename T>
    static T of(T a, T b) {
        using W = typename Wrapping<T>::type;
        return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
    }
};
struct Multiply {
    template <typename T>
    static T of(T a, T b) {
        using W = typename Wrapping<T>::type;
        return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    }
};
struct Min {
    template <typename T>
    static T of(T a, T b) {
        return (a < b || a != a) ? a : b;  // a != a: a is NaN; if b is NaN, the comparison is false and b is taken
    }
};
struct Max {
    template <typename T>
    static T of(T a, T b) {
        return (a > b || a != a) ? a : b;
    }
};

// Converts a stored element to the number to compute with, and back.
template <typename T>
struct Plain {
    using Stored = T;
    static T load(T value) { return value; }
    static T store(T value) { return value; }
};
struct Half {
    using Stored = uint16_t;
    static float load(uint16_t value) { return half_to_float(value); }
    static uint16_t store(float value) { return float_to_half(value); }
};
struct Bfloat {
    using Stored = uint16_t;
    static float load(uint16_t value) { return bfloat_to_float(value); }
    static uint16_t store(float value) { return float_to_bfloat(value); }
};

// `ivdep`: `out` may be exactly `a` or `b`, which carries nothing from one element to another. It also keeps the
// compiler from choosing a loop by the pointers, so that all ranks run the same instructions on the same operands.
template <typename Element, typename Op>
void combine_loop(void* out, const void* a, const void* b, size_t count) {
    using Stored = typename Element::Stored;
    auto* o = static_cast<Stored*>(out);
    const auto* x = static_cast<const Stored*>(a);
    const auto* y = static_cast<const Stored*>(b);
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) o[i] = Element::store(Op::of(Element::load(x[i]), Element::load(y[i])));
}

template <typename Element>
void combine_by_op(void* out, const void* a, const void* b, size_t count, ReduceOp op) {
    switch (op) {
        case DDL_SUM:
        case DDL_AVERAGE: return combine_loop<Element, Add>(out, a, b, count);
        case DDL_MIN: return combine_loop<Element, Min>(out, a, b, count);
        case DDL_MAX: return combine_loop<Element, Max>(out, a, b, count);
        case DDL_PRODUCT: return combine_loop<Element, Multiply>(out, a, b, count);
    }
}

template <typename Element>
void divide_loop(void* values, size_t count, int divisor) {
    using Stored = typename Element::Stored;
    using Number = decltype(Element::load(Stored{}));
    auto* v = static_cast<Stored*>(values);
    // Integers divide in 64 bits: the number of ranks need not fit an int8.
    using Wide = std::conditional_t<std::is_integral_v<Number>, int64_t, Number>;
    const auto by = static_cast<Wide>(divisor);
    for (size_t i = 0; i < count; ++i) {
        v[i] = Element::store(static_cast<Number>(static_cast<Wide>(Element::load(v[i])) / by));
    }
}

// Calls `f` with the element type of `type`.
template <typename F>
auto visit(DataType type, F&& f) {
    switch (type) {
        case DDL_FLOAT16: return f(Half{});
        case DDL_BFLOAT16: return f(Bfloat{});
        case DDL_FLOAT32: return f(Plain<float>{});
        case DDL_FLOAT64: return f(Plain<double>{});
        case DDL_INT8: return f(Plain<int8_t>{});
        case DDL_INT32: return f(Plain<int32_t>{});
        case DDL_INT64: return f(Plain<int64_t>{});
        case DDL_UINT8: return f(Plain<uint8_t>{});
    }
    throw Error(DDL_ERROR_ARGUMENT, "data type " + std::to_string(static_cast<int>(type)) + " is not a ddl_type");
}

}  // namespace

bool is_valid(DataType type) { return type >= DDL_FLOAT16 && type <= DDL_UINT8; }
bool is_valid(ReduceOp op) { return op >= DDL_SUM && op <= DDL_PRODUCT; }

bool is_float(DataType type) { return type >= DDL_FLOAT16 && type <= DDL_FLOAT64; }

size_t size_of(DataType type) {
    return visit(type, [](auto element) { return sizeof(typename decltype(element)::Stored); });
}

uint64_t elements_in(uint64_t bytes, DataType type) {
    return visit(type, [bytes](auto element) { return bytes / sizeof(typename decltype(element)::Stored); });
}

const char* name_of(DataType type) {
    switch (type) {
        case DDL_FLOAT16: return "float16";
        case DDL_BFLOAT16: return "bfloat16";
        case DDL_FLOAT32: return "float32";
        case DDL_FLOAT64: return "float64";
        case DDL_INT8: return "int8";
        case DDL_INT32: return "int32";
        case DDL_INT64: return "int64";
        case DDL_UINT8: return "uint8";
    }
    return "unknown type";
}

const char* name_of(ReduceOp op) {
    switch (op) {
        case DDL_SUM: return "sum";
        case DDL_AVERAGE: return "average";
        case DDL_MIN: return "min";
        case DDL_MAX: return "max";
        case DDL_PRODUCT: return "product";
    }
    return "unknown operation";
}

void combine(void* out, const void* a, const void* b, size_t count, DataType type, ReduceOp op) {
    const bool halves = type == DDL_FLOAT16 || type == DDL_BFLOAT16;
    if (halves && (op == DDL_SUM || op == DDL_AVERAGE)) {
        const auto add = type == DDL_FLOAT16 ? add_halves : add_bfloats;
        return add(static_cast<uint16_t*>(out), static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b),
                   count);
    }
    visit(type, [&](auto element) { combine_by_op<decltype(element)>(out, a, b, count, op); });
}

void divide(void* values, size_t count, DataType type, int divisor) {
    visit(type, [&](auto element) { divide_loop<decltype(element)>(values, count, divisor); });
}

}  // namespace ddl
