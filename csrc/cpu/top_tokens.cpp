// One task per row, which reads it three times: for its highest value, for the best tokens, for the normaliser.
#include "ops/top_tokens.h"

#include "cpu/best_of_row.h"
#include "cpu/parallel_for.h"

namespace specengine::SPECENGINE_ISA {
namespace {

constexpr int32_t kNone = -1;  // in place of a row's first token: the row has no distribution

[[noreturn]] void refuse(const float* x, int64_t row, int64_t size) {
  for (int64_t v = 0; v < size; ++v) {
    if (x[v] != x[v]) fail("logits: NaN at [", row, ", ", v, "]");
  }
  fail("logits: [", row, "] has no finite highest score");
}

}  // namespace

void run(const TopTokens& op) {
  const int64_t R = op.logits.shape[0], V = op.logits.shape[1], k = op.tokens.shape[1];
  const int32_t* known = op.known.given() ? op.known.as<int32_t>() : nullptr;
  const int64_t shared = known ? R / op.known.shape[0] : 1;
  const auto is_idle = [&](int64_t r) { return known && known[r / shared] <= 0; };
  parallel_for(R, [&](int64_t r) {
    if (is_idle(r)) return;
    const float* x = op.logits.as<float>() + r * V;
    int32_t* tokens = op.tokens.as<int32_t>() + r * k;
    float* values = op.log_probs.as<float>() + r * k;
    bool sees_nan = false;
    if (!std::isfinite(highest_of(x, V, sees_nan)) || sees_nan) {
      tokens[0] = kNone;
      return;
    }
    top_k(x, V, k, tokens, values);
    const float normaliser = log_sum_exp(x, V, values[0]);
    for (int64_t i = 0; i < k; ++i) values[i] -= normaliser;
  });
  for (int64_t r = 0; r < R; ++r) {
    if (!is_idle(r) && op.tokens.as<int32_t>()[r * k] == kNone) refuse(op.logits.as<float>() + r * V, r, V);
  }
}

}  // namespace specengine::SPECENGINE_ISA
