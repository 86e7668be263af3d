// Data types, operations, and the loops that reduce.
//
// Numbers. Sums and products of integers wrap around (two's complement). float16 and bfloat16 are computed in float32
// and rounded to nearest even after each operation: the wire carries the input's type, so each hop rounds. `min` and
// `max` give NaN if either operand is NaN. `average` is a sum that is divided once, at the end, by the number of ranks:
// integers round towards zero, and a float16 sum may overflow before the division, as with `sum`.
//
// Bits. The order of the operands matters only if both are NaN (which payload is kept) and, for `min` and `max`, if
// they are zeros of different sign. So schedules fix that order too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ddl.h"

namespace ddl {

using DataType = ddl_type;
using ReduceOp = ddl_op;

bool is_valid(DataType type);
bool is_valid(ReduceOp op);

// True for floating point types, which have NaNs.
bool is_float(DataType type);

// Bytes of an element: a power of two.
size_t size_of(DataType type);
// bytes / size_of(type), by a shift: a division takes longer than the sum of a few numbers.
uint64_t elements_in(uint64_t bytes, DataType type);

// "float32", "average".
const char* name_of(DataType type);
const char* name_of(ReduceOp op);

// out[i] = a[i] op b[i] for `count` elements. `out` may be `a` or `b`, and must not overlap them in any other way.
// `average` adds: see divide(). Pointers need the alignment of the element.
void combine(void* out, const void* a, const void* b, size_t count, DataType type, ReduceOp op);

// values[i] /= divisor: turns a sum over `divisor` ranks into an average.
void divide(void* values, size_t count, DataType type, int divisor);

}  // namespace ddl
