// The likeliest tokens of rows of logits, as an op of its own.
#pragma once
#include "ops/growth/vocabulary_parts.h"
#include "ops/top_tokens.h"

namespace specengine {

// The CPU refuses a row with NaN or +infinity, or all -infinite; on CUDA its tokens are -1 and its log-probabilities 0.
struct BestTokens {
  TensorView logits;      // [R, V] float32
  VocabularyParts parts;  // workspace
  TensorView tokens;      // [R, k] int32, written: likeliest first, of equals the lower token first
  TensorView log_probs;   // [R, k] float32, written

  Device validate() const {
    Checker check;
    Dim R{"R"}, V{"Vd"}, k{"k"};
    check(logits, "logits", {DType::kFloat32}, {R, V});
    check(tokens, "tokens", {DType::kInt32}, {R, k});
    check(log_probs, "log_probs", {DType::kFloat32}, {R, k});
    check_parts(check, parts, R, V, k, R);
    return check.device();
  }
};

#if !defined(SPECENGINE_SIM)
inline void run_cpu(const BestTokens& op) { run_cpu(TopTokens{op.logits, op.tokens, op.log_probs}); }
#endif
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const BestTokens&);
#endif

}  // namespace specengine
