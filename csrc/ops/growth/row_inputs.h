// Rows as the products of captured drafters read them: two tensors side by side.
#pragma once
#include "base/check.h"

namespace specengine {

// out[m] = [left row | right row] of every row m, each normed where a norm is given: x / sqrt(mean(x^2) + eps) * norm.
struct JoinRows {
  TensorView left;            // [L, C] float32 | bfloat16 | float16
  OptionalTensor ids;         // [M] int32, rows of left; zeros stand for one that it lacks. None: M / L rows share one
  TensorView right;           // [R, D] float32
  OptionalTensor above;       // [M] int64, rows of right; None: R is M
  OptionalTensor left_norm;   // [C] float32
  OptionalTensor right_norm;  // [D] float32
  OptionalTensor stream;      // [M, D] float32, written: the rows of right, normed if norms_stream
  TensorView out;             // [M, C + D] float32 | bfloat16 | float16, written
  bool norms_stream;
  float eps;

  Device validate() const {
    Checker check;
    Dim L{"L"}, C{"C"}, M{"M"}, R{"R"}, D{"D"};
    check(left, "left", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {L, C});
    check(right, "right", {DType::kFloat32}, {R, D});
    check.optional(ids, "ids", {DType::kInt32}, {M});
    check.optional(above, "above", {DType::kInt64}, {M});
    check.optional(left_norm, "left_norm", {DType::kFloat32}, {C});
    check.optional(right_norm, "right_norm", {DType::kFloat32}, {D});
    check.optional(stream, "stream", {DType::kFloat32}, {M, D});
    check(out, "out", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, C + D});
    if (!above.given() && R != M) fail("right: expected ", M.value, " rows, got ", R.value);
    if (!ids.given() && (L < 1 || M % L != 0)) fail("left: ", L.value, " rows are no part of M=", M.value);
    if (norms_stream && !right_norm.given()) fail("norms_stream: there is no right_norm");
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const JoinRows&);
#endif

}  // namespace specengine
