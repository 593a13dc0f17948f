// The embedding and the first norm in one launch.
#pragma once
#include "ops/layer.h"

namespace specengine {

// residual = rows `ids` of an embedding; out = their norm: GatherRows, then RmsNorm. On CUDA alone.
struct GatherNorm {
  TensorView weight;    // [V, C] float32 | bfloat16 | float16
  TensorView ids;       // [M] int32; an id that is no row gives zeros
  TensorView residual;  // [M, C] float32, written
  TensorView norm;      // [C] float32
  TensorView out;       // [M, C] float32 | bfloat16 | float16, written
  OptionalTensor kept;  // [M, L, C] float32, whose layer `place` becomes the residual
  float eps;
  int64_t place;

  Device validate() const {
    Checker check;
    Dim V{"V"}, M{"M"}, C{"C"};
    check(weight, "weight", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {V, C});
    if (!check.for_cuda()) fail("weight: expected a tensor on cuda");
    check(ids, "ids", {DType::kInt32}, {M});
    check(residual, "residual", {DType::kFloat32}, {M, C});
    check(norm, "norm", {DType::kFloat32}, {C});
    check(out, "out", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, C});
    check_kept(check, kept, place, M, C);
    if (C % 4 != 0) fail("weight: expected a multiple of 4 columns, got ", C.value);
    check_aligned(residual, "residual"), check_aligned(norm, "norm"), check_aligned(out, "out");
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const GatherNorm&);
#endif

}  // namespace specengine
