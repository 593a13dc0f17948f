// out[M, N] = x[M, C] @ weight[N, C]^T + bias[N], weight packed as in ops/packed_weight.h. Weights of floats, e4m3
// among them, multiply float32 rows; other codes multiply rows quantised to int8, block by block of 32 columns, with
// one scale per row and block. On CUDA the rows have the weight's dtype.
#pragma once
#include <cstring>
#include <iterator>

#include "base/check.h"
#include "base/isa.h"
#include "base/philox.h"
#include "base/token_mask.h"
#include "ops/packed_weight.h"

namespace specengine {

// 32 columns of a quantised row; a row of C columns is C / 32 of them, the last one padded with zeros.
struct RowBlock {
  int8_t code[kBlock];  // -127..127: x = scale * code
  float scale;          // NaN if x has an entry that is not finite
  float sum;            // scale * code_sum
  int32_t code_sum;
};
constexpr int64_t kRowBlockBytes = sizeof(RowBlock);

struct QuantiseRows {
  TensorView x;                 // [M, C] float32
  TensorView out;               // [M, ceil(C / 32), 44] uint8 (RowBlock), written
  OptionalTensor columns = {};  // [C] int32: column i of out is column columns[i] of x; None: as they are

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"};
    check(x, "x", {DType::kFloat32}, {M, C});
    check(out, "out", {DType::kUInt8}, {M, blocks_of(C), kRowBlockBytes});
    check_columns(check, columns, C);
    return check.device();
  }

  static void check_columns(Checker& check, const OptionalTensor& columns, int64_t C) {
    check.optional(columns, "columns", {DType::kInt32}, {C});
    if (columns.defined()) check_ids(columns, "columns", C);
  }
};

// A block of the CUDA kernel owns rows of the weight; its warps share their columns. Variants with equally many warps
// add in the same order and give the same bits.
struct LinearVariant {
  int rows, warps;
};
constexpr LinearVariant kLinearVariants[] = {{16, 8}, {16, 16}, {32, 8}, {64, 8}};

// Checks the factors of a product and the `rows` of its weight. variant: a place in kLinearVariants from 1 on, or 0 for
// the first one; always 0 on the CPU. x is float32 [M, C], or uint8 [M, ceil(C / 32), 44] for a quantised weight; on
// CUDA [M, C] in the weight's dtype.
inline void check_product(Checker& check, const TensorView& x, const TensorView& weight, int64_t rows, int64_t variant,
                          Dim& M) {
  Dim C{"C"};
  if (for_cuda(weight.device)) {
    Dim N{"N"};
    check_row_major(check, weight, "weight", N, C);
    check(x, "x", {weight.dtype}, {M, C});
    check_aligned(x, "x");
    if (rows != N) fail("rows: ", rows, " rows do not match the weight's ", N.value);
    constexpr int64_t kVariants = std::size(kLinearVariants);
    if (variant < 0 || variant > kVariants) fail("variant: expected 0 to ", kVariants, ", got ", variant);
    return;
  }
  Dim P{"P"};
  check_weight(check, weight, "weight", P, C);
  if (rows < 0 || rows / kPanel + (rows % kPanel != 0) != P) {
    fail("rows: ", rows, " rows do not match ", P.value, " panels of 16");
  }
  if (variant != 0) fail("variant: expected 0 on cpu, got ", variant);
  if (weight.dtype != DType::kUInt8) return check(x, "x", {DType::kFloat32}, {M, C});
  const BlockFormat& format = format_of(weight);
  if (!format.quantises_rows() || x.dtype == DType::kFloat32) {
    check(x, "x", {DType::kFloat32}, {M, C});
  } else if (format.columns == kBlock) {
    Dim blocks{"C/32", weight.shape[1], "weight"};
    return check(x, "x", {DType::kUInt8}, {M, blocks, kRowBlockBytes});
  } else {
    Dim blocks{"C/32"};
    check(x, "x", {DType::kUInt8}, {M, blocks, kRowBlockBytes});
    C.value = blocks * kBlock;
  }
  if (blocks_of(C, format.columns) != weight.shape[1]) {
    fail("x: ", C.value, " columns do not match the weight's ", weight.shape[1], " blocks of ", format.columns);
  }
}

// Masks of the rows of a product: [M, ceil(rows / 32)] int32, see base/token_mask.h. On the CPU alone.
inline void check_masks(Checker& check, const OptionalTensor& masks, const TensorView& weight, int64_t rows, Dim& M) {
  if (masks.defined() && for_cuda(weight.device)) fail("masks: expected None on cuda");
  check.optional(masks, "masks", {DType::kInt32}, {M, rows / kMaskBits + (rows % kMaskBits != 0)});
}

struct Linear {
  TensorView x;         // see check_product
  TensorView weight;    // any format; on CUDA [rows, C] as it is
  OptionalTensor bias;  // [N] float32
  TensorView out;       // [M, N] float32; columns [first, first + rows) are written
  int64_t first;
  int64_t rows;  // of this weight: a fused projection may consist of weights of several formats
  int64_t variant = 0;
  OptionalTensor masks = {};  // see check_masks; panels of which no row is allowed any column are 0

  Device validate() const {
    Checker check;
    Dim M{"M"}, N{"N"};
    check_product(check, x, weight, rows, variant, M);
    check(out, "out", {DType::kFloat32}, {M, N});
    check.optional(bias, "bias", {DType::kFloat32}, {N});
    if (rows < 0 || first < 0 || first > N - rows) {
      fail("first: ", rows, " columns from ", first, " on are not in out's N=", N.value);
    }
    check_masks(check, masks, weight, rows, M);
    return check.device();
  }
};

// The largest entry of each row of the same product, without storing the product: enough for greedy verification.
struct LinearArgmax {
  TensorView x;          // see check_product
  TensorView weight;     // any format; on CUDA [rows, C] as it is
  OptionalTensor bias;   // [N] float32
  OptionalTensor masks;  // see check_masks; the entries that count, None: all
  TensorView ids;   // [M] int32, written: the lowest index of the largest entry; -1 if any is NaN or it is infinite
  TensorView keys;  // [M] int64, workspace
  int64_t rows;     // N
  int64_t variant = 0;

  Device validate() const {
    Checker check;
    Dim M{"M"}, N{"N", rows, "rows"};
    check_product(check, x, weight, rows, variant, M);
    check.optional(bias, "bias", {DType::kFloat32}, {N});
    check(ids, "ids", {DType::kInt32}, {M});
    check(keys, "keys", {DType::kInt64}, {M});
    if (rows < 1) fail("rows: ", rows, " rows have no largest entry");
    check_masks(check, masks, weight, rows, M);
    return check.device();
  }
};

// An integer that orders as the result does, ties by lower column, a NaN above all.
SPECENGINE_HOST_DEVICE inline int64_t argmax_key(float value, int64_t column) {
  int32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const int32_t order = value != value ? INT32_MAX : value == 0 ? 0 : bits < 0 ? bits ^ INT32_MAX : bits;
  return static_cast<int64_t>(order) * (int64_t{1} << 32) + (UINT32_MAX - column);
}
constexpr int64_t kLeastKey = INT64_MIN;

// The column of the largest key, -1 where the entry is not finite.
SPECENGINE_HOST_DEVICE inline int32_t argmax_of(int64_t key) {
  constexpr int32_t kInfinity = 0x7F800000;
  const int32_t order = static_cast<int32_t>(key >> 32);
  const bool finite = order < kInfinity && order > -kInfinity - 1;
  return finite ? static_cast<int32_t>(UINT32_MAX - (key & UINT32_MAX)) : -1;
}

SPECENGINE_CPU_OP(QuantiseRows)
SPECENGINE_WIDE_CPU_OP(Linear)
SPECENGINE_WIDE_CPU_OP(LinearArgmax)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const Linear&);
void run_cuda(const LinearArgmax&);
#endif

}  // namespace specengine
