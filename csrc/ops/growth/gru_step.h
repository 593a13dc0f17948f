// A step of a gated recurrent unit along drafted paths (Cho et al. 2014, as PyTorch's GRU), behind its two products.
#pragma once
#include "base/check.h"

namespace specengine {

// Parts of a row: reset, update, new. u = sigmoid(update), n = tanh(new + sigmoid(reset) * kept new);
// next = (1 - u) n + u state.
struct GruStep {
  TensorView read;         // [R, 3G] float32, made of the tokens
  OptionalTensor kept;     // [S, 3G] float32, made of the states; None: states are zeros
  OptionalTensor state;    // [S, G] float32, as kept
  OptionalTensor above;    // [R] int64, the state that each row continues; None: that of its number
  TensorView next;         // [R, G] float32, written
  OptionalTensor rounded;  // [R, G] bfloat16 | float16 | float32, written: next as a product reads it

  Device validate() const {
    Checker check;
    Dim R{"R"}, S{"S"}, N{"3G"}, G{"G"};
    check(next, "next", {DType::kFloat32}, {R, G});
    if (!check.for_cuda()) fail("next: expected a tensor on cuda");
    check(read, "read", {DType::kFloat32}, {R, N});
    if (N != 3 * G) fail("read: expected ", 3 * G, " columns, got ", N.value);
    check.optional(kept, "kept", {DType::kFloat32}, {S, N});
    check.optional(state, "state", {DType::kFloat32}, {S, G});
    check.optional(above, "above", {DType::kInt64}, {R});
    check.optional(rounded, "rounded", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {R, G});
    if (kept.given() != state.given()) fail("state: expected with kept, or neither");
    if (kept.given() && !above.given() && S != R) fail("state: expected ", R.value, " rows, got ", S.value);
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const GruStep&);
#endif

}  // namespace specengine
