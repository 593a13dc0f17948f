// Rows plus what a product made of them, as the next product of a captured drafter reads them.
#pragma once
#include "base/check.h"

namespace specengine {

// sum = x + delta, or x + silu(delta); out is the same in another dtype.
struct AddDelta {
  OptionalTensor x;    // [M, C] float32; None: zeros
  TensorView delta;    // [M, C] float32
  OptionalTensor sum;  // [M, C] float32, written; x or delta may lie there
  OptionalTensor out;  // [M, C] float32 | bfloat16 | float16, written
  bool silu;

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"};
    check(delta, "delta", {DType::kFloat32}, {M, C});
    check.optional(x, "x", {DType::kFloat32}, {M, C});
    check.optional(sum, "sum", {DType::kFloat32}, {M, C});
    check.optional(out, "out", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, C});
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const AddDelta&);
#endif

}  // namespace specengine
