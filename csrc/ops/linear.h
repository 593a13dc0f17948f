// out[M, N] = x[M, C] @ weight[N, C]^T + bias[N], weight packed as ops/weight.h says. A float weight multiplies float32
// rows; a quantised one multiplies rows quantised to int8, block by block of 32 columns, with one scale per row and
// block.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "ops/weight.h"

namespace specengine {

// 32 columns of a quantised row; a row of C columns is C / 32 of them, the last one padded with zeros.
struct RowBlock {
  int8_t code[kBlock];  // -127..127: x = scale * code
  float scale;          // NaN where x has an entry that is not finite
  float sum;            // scale * code_sum
  int32_t code_sum;
};
constexpr int64_t kRowBlockBytes = sizeof(RowBlock);

struct QuantiseRows {
  TensorView x;    // [M, C] float32
  TensorView out;  // [M, ceil(C / 32), 44] uint8 (RowBlock), written

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"};
    check(x, "x", {DType::kFloat32}, {M, C});
    check(out, "out", {DType::kUInt8}, {M, blocks_of(C), kRowBlockBytes});
    return check.device();
  }
};

// Rows as a weight of this kind wants them: float32 [M, C], or uint8 [M, ceil(C / 32), 44].
inline void check_linear_rows(Checker& check, const TensorView& x, const TensorView& weight, Dim& M, Dim& P) {
  Dim C{"C"};
  check_weight(check, weight, "weight", P, C);
  if (weight.dtype != DType::kUInt8) return check(x, "x", {DType::kFloat32}, {M, C});
  Dim blocks{"C/32", weight.shape[1], "weight"};
  check(x, "x", {DType::kUInt8}, {M, blocks, kRowBlockBytes});
}

struct Linear {
  TensorView x;       // [M, C] float32, or quantised rows
  TensorView weight;  // any format
  TensorView bias;    // [N] float32, optional
  TensorView out;     // [M, N] float32; columns [first, first + rows) are written
  int64_t first;
  int64_t rows;  // of the weight: one fused projection may consist of weights of several formats

  Device validate() const {
    Checker check;
    Dim M{"M"}, P{"P"}, N{"N"};
    check_linear_rows(check, x, weight, M, P);
    check(out, "out", {DType::kFloat32}, {M, N});
    check.optional(bias, "bias", {DType::kFloat32}, {N});
    if (rows < 0 || first < 0 || first > N - rows) {
      fail("first: ", rows, " columns from ", first, " on are not in out's N=", N.value);
    }
    if ((rows + kPanel - 1) / kPanel != P) fail("rows: ", rows, " rows do not match ", P.value, " panels of 16");
    return check.device();
  }
};

// The largest entry of each row of the same product, without storing the product: greedy verification of a tree needs
// no more.
struct LinearArgmax {
  TensorView x;       // [M, C] float32, or quantised rows
  TensorView weight;  // any format
  TensorView bias;    // [N] float32, optional
  TensorView ids;   // [M] int32, written: the lowest index of the largest entry; -1 if an entry is NaN or that infinite
  TensorView keys;  // [M] int64, workspace
  int64_t rows;     // N

  Device validate() const {
    Checker check;
    Dim M{"M"}, P{"P"}, N{"N", rows, "rows"};
    check_linear_rows(check, x, weight, M, P);
    check.optional(bias, "bias", {DType::kFloat32}, {N});
    check(ids, "ids", {DType::kInt32}, {M});
    check(keys, "keys", {DType::kInt64}, {M});
    if (rows < 1 || (rows - 1) / kPanel + 1 != P) {
      fail("rows: ", rows, " rows do not match ", P.value, " panels of 16");
    }
    return check.device();
  }
};

SPECENGINE_CPU_OP(QuantiseRows)
SPECENGINE_WIDE_CPU_OP(Linear)
SPECENGINE_WIDE_CPU_OP(LinearArgmax)

}  // namespace specengine
