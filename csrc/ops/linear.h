// out[M, N] = x[M, C] @ weight[N, C]^T + bias[N], weight packed in panels of 16 output columns.
#pragma once
#include "base/check.h"
#include "base/isa.h"

namespace specengine {

constexpr int64_t kPanel = 16;  // a panel holds 16 rows of the weight, interleaved: [C, 16]

// Writes rows [first, first + R) of a weight into its packed form; rows past N in the last panel stay as they are.
struct PackLinear {
  TensorView rows;    // [R, C] float32 | bfloat16 | float16
  TensorView packed;  // [P, C, 16] float32 | bfloat16, written
  int64_t first;

  Device validate() const {
    Checker check;
    Dim R{"R"}, C{"C"}, P{"P"};
    check(rows, "rows", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {R, C});
    check(packed, "packed", {DType::kFloat32, DType::kBFloat16}, {P, C, kPanel});
    if (first < 0 || first > P * kPanel - R) {
      fail("first: ", R.value, " rows from ", first, " on do not fit in ", P * kPanel, " packed rows");
    }
    return check.device();
  }
};

struct Linear {
  TensorView x;       // [M, C] float32
  TensorView weight;  // [P, C, 16] float32 | bfloat16
  TensorView bias;    // [N] float32, optional
  TensorView out;     // [M, N] float32, written

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"}, P{"P"}, N{"N"};
    check(x, "x", {DType::kFloat32}, {M, C});
    check(weight, "weight", {DType::kFloat32, DType::kBFloat16}, {P, C, kPanel});
    check(out, "out", {DType::kFloat32}, {M, N});
    check.optional(bias, "bias", {DType::kFloat32}, {N});
    if ((N + kPanel - 1) / kPanel != P) fail("out: N=", N.value, " columns do not match ", P.value, " panels of 16");
    return check.device();
  }
};

// out[M, C] = rows `ids` of a packed weight: the embedding lookup, so that a tied head is stored once.
struct GatherRows {
  TensorView weight;  // [P, C, 16] float32 | bfloat16
  TensorView ids;     // [M] int32
  TensorView out;     // [M, C] float32, written

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"}, P{"P"};
    check(weight, "weight", {DType::kFloat32, DType::kBFloat16}, {P, C, kPanel});
    check(ids, "ids", {DType::kInt32}, {M});
    check(out, "out", {DType::kFloat32}, {M, C});
    return check.device();
  }
};

SPECENGINE_WIDE_CPU_OP(PackLinear)
SPECENGINE_WIDE_CPU_OP(Linear)
SPECENGINE_WIDE_CPU_OP(GatherRows)

}  // namespace specengine
