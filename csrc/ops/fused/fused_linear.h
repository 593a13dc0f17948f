// Linear layers that end with the op behind them, on CUDA: one launch instead of two, with the bits of the two. A
// weight of floats and at most kMostFusedRows rows.
#pragma once
#include "ops/fused/gather_norm.h"
#include "ops/layer.h"
#include "ops/linear.h"

namespace specengine {

constexpr int64_t kMostFusedRows = 8;  // rows of x that the tensor cores take at once

// Checks x[M, C] and weight[N, C], a bias and the variant.
inline void check_fused_product(Checker& check, const TensorView& x, const TensorView& weight,
                                const OptionalTensor& bias, int64_t variant, Dim& M, Dim& N) {
  Dim C{"C"};
  check(x, "x", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, C});
  if (!check.for_cuda()) fail("x: expected a tensor on cuda");
  check_product(check, x, weight, weight.ndim > 0 ? weight.shape[0] : 0, variant, M);
  N.value = weight.shape[0];
  check.optional(bias, "bias", {DType::kFloat32}, {N});
  if (M > kMostFusedRows) fail("x: expected at most ", kMostFusedRows, " rows, got ", M.value);
}

// out = silu(gate) * up of linear's [gate | up]: linear, then SiluMul.
struct LinearSilu {
  TensorView x;         // [M, C], the weight's dtype
  TensorView weight;    // [2I, C] float32 | bfloat16 | float16
  OptionalTensor bias;  // [2I] float32
  TensorView out;       // [M, I], the weight's dtype; written
  int64_t variant = 0;

  Device validate() const {
    Checker check;
    Dim M{"M"}, N{"2I"};
    check_fused_product(check, x, weight, bias, variant, M, N);
    if (N % 2 != 0) fail("weight: expected an even number of rows, got ", N.value);
    check(out, "out", {weight.dtype}, {M, N / 2});
    return check.device();
  }
};

// residual += linear; out = its norm: linear, then RmsNorm.
struct LinearNorm {
  TensorView x;         // [M, C], the weight's dtype
  TensorView weight;    // [N, C] float32 | bfloat16 | float16
  OptionalTensor bias;  // [N] float32
  TensorView residual;  // [M, N] float32, written
  TensorView norm;      // [N] float32
  TensorView out;       // [M, N], float32 or the weight's dtype; written
  OptionalTensor kept;  // [M, L, N] float32, whose layer `place` becomes the residual
  TensorView arrived;   // [counters] int32, workspace, 0 before and after
  float eps;
  int64_t place, variant = 0;

  Device validate() const {
    Checker check;
    Dim M{"M"}, N{"N"}, counters{"counters"};
    check_fused_product(check, x, weight, bias, variant, M, N);
    check(residual, "residual", {DType::kFloat32}, {M, N});
    check(norm, "norm", {DType::kFloat32}, {N});
    check(out, "out", {DType::kFloat32, weight.dtype}, {M, N});
    check(arrived, "arrived", {DType::kInt32}, {counters});
    check_kept(check, kept, place, M, N);
    if (N % 4 != 0) fail("weight: expected a multiple of 4 rows, got ", N.value);
    check_aligned(residual, "residual"), check_aligned(norm, "norm"), check_aligned(out, "out");
    if (counters < 1) fail("arrived: expected at least 1 counter, got ", counters.value);
    return check.device();
  }
};

// What rotates and normalises rows of q and k: see RopeCache.
struct RotatedRows {
  static constexpr char kRecord[] = "RotatedRows";
  TensorView cos;         // [T, R/2] float32, T positions
  TensorView sin;         // [T, R/2] float32
  OptionalTensor q_norm;  // [D] float32
  OptionalTensor k_norm;  // [D] float32
  TensorView depths;      // [M] int32, root 0
};

// qkv = linear; q and the cache as RopeCache writes them: linear, then RopeCache.
struct LinearRope {
  TensorView x;         // [M, C], the weight's dtype
  TensorView weight;    // [Q, C] float32 | bfloat16 | float16
  OptionalTensor bias;  // [Q] float32
  TensorView qkv;       // [M, Q] float32, written: see RopeCache
  RotatedRows rows;
  KvCacheView cache;   // one layer, written; of the weight's dtype
  TensorView q;        // [M, H, D] float32, written
  TensorView arrived;  // [counters] int32, at least one for each head of Q / D; workspace, 0 before and after
  float eps;
  int64_t variant = 0;

  RopeCache rope() const { return {qkv, rows.cos, rows.sin, rows.q_norm, rows.k_norm, rows.depths, cache, q, eps}; }

  // Rows of the weight that a block owns.
  int64_t block_rows() const { return kLinearVariants[variant == 0 ? 0 : variant - 1].rows; }

  Device validate() const {
    Checker check;
    Dim M{"M"}, Q{"Q"}, counters{"counters"};
    check_fused_product(check, x, weight, bias, variant, M, Q);
    check(qkv, "qkv", {DType::kFloat32}, {M, Q});
    check(arrived, "arrived", {DType::kInt32}, {counters});
    const Device device = rope().validate();
    const int64_t D = cache.dim();
    if (cache.k_cache.dtype != weight.dtype) fail("k_cache: expected the weight's dtype");
    if (D % block_rows() != 0) {
      fail("variant: expected blocks of rows that divide the head dim ", D, ", got ", block_rows(), " rows");
    }
    const auto whole = [&](const OptionalTensor& norm) { return norm.defined() && norm.shape[0] != D; };
    if (whole(rows.q_norm)) fail("q_norm: expected a norm for each head");
    if (whole(rows.k_norm)) fail("k_norm: expected a norm for each head");
    if (counters < Q / D) fail("arrived: expected at least ", Q / D, " counters, got ", counters.value);
    return device;
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const LinearSilu&);
void run_cuda(const LinearNorm&);
void run_cuda(const LinearRope&);
#endif

}  // namespace specengine
