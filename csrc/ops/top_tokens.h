// The likeliest tokens of rows of logits, for ops that draft.
#pragma once
#include "base/check.h"
#include "base/isa.h"

namespace specengine {

// Refuses a row with NaN or +infinity, or all -infinite. Called by other ops alone, which own its arguments.
struct TopTokens {
  TensorView logits;          // [R, V] float32
  TensorView tokens;          // [R, k] int32, written: likeliest first, of equals the lower token first
  TensorView log_probs;       // [R, k] float32, written
  OptionalTensor known = {};  // [B] int32, 0: nothing of R / B neighbouring rows is read or written; None: all are
};

SPECENGINE_CPU_OP(TopTokens)

}  // namespace specengine
