// Chains as rows of a pass inside captured cycles.
#pragma once
#include "base/check.h"

namespace specengine {

// Chains of B requests, N rows each. Padding has token, parent and depth -1 and no ancestor bits.
struct ChainColumns {
  static constexpr char kRecord[] = "ChainColumns";
  TensorView tokens;     // [B * N] int32
  TensorView parents;    // [B * N] int32
  TensorView depths;     // [B * N] int32
  TensorView ancestors;  // [B * N, W] int32 bits

  void validate(Checker& check, Dim& M, Dim& W) const {
    check(tokens, "rows.tokens", {DType::kInt32}, {M});
    check(parents, "rows.parents", {DType::kInt32}, {M});
    check(depths, "rows.depths", {DType::kInt32}, {M});
    check(ancestors, "rows.ancestors", {DType::kInt32}, {M, W});
  }
};

}  // namespace specengine
