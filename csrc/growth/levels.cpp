// Levels of growing trees on the CPU.
#include "growth/select.h"
#include "growth/shapes.h"
#include "ops/growth/expand_level.h"
#include "ops/top_tokens.h"

namespace specengine {
namespace {

// The logits of each row of a level, with the delta of each added where there is one: [B * w, V], or [B, V] as given.
TensorView summed(const LevelLogits& level, std::vector<float>& sums) {
  if (!level.delta.given()) return level.logits;
  const int64_t V = level.logits.shape[1], rows = level.delta.shape[0], shared = rows / level.logits.shape[0];
  sums.resize(rows * V);
  for (int64_t r = 0; r < rows; ++r) {
    const float *logits = level.logits.as<float>() + r / shared * V, *delta = level.delta.as<float>() + r * V;
    for (int64_t v = 0; v < V; ++v) sums[r * V + v] = logits[v] + delta[v];
  }
  TensorView all = level.delta;
  all.data = sums.data();
  return all;
}

}  // namespace

void run_cpu(const GrowLevel& op) {
  const int64_t B = op.roots.shape[0];
  const Growth growth = growth_of(op, op.best_tokens.shape[1], true);
  const int width = op.best_tokens.shape[0] == B ? 1 : growth.width;
  for (int b = 0; b < B; ++b) {
    grow_level(growth, b, [&](int row, int j) {
      const int64_t place = (int64_t{b} * width + (width == 1 ? 0 : row)) * growth.children + j;
      return Drafted{op.best_tokens.as<int>()[place], op.best_scores.as<float>()[place]};
    });
  }
}

void run_cpu(const ExpandLevel& op) {
  const int64_t B = op.roots.shape[0], k = op.parts.tokens.shape[2];
  const Growth growth = growth_of(op, k, true);
  const LikeliestChildren children = children_of(op.level, B * growth.width);
  std::vector<float> sums;
  const TensorView logits = summed(op.level, sums);
  TensorView tokens = op.parts.tokens, log_probs = op.parts.scores;  // the CPU does not divide the vocabulary
  for (TensorView* each : {&tokens, &log_probs}) {
    each->ndim = 2, each->shape[0] = logits.shape[0], each->shape[1] = k, each->strides[0] = k, each->strides[1] = 1;
  }
  if (B > 0) run_cpu(TopTokens{logits, tokens, log_probs, op.known});
  const int64_t own = B > 0 ? logits.shape[0] / B : 0;  // rows of logits of a request
  for (int b = 0; b < B; ++b) {
    grow_level(growth, b, [&](int row, int j) {
      if (op.known.as<int>()[b] <= 0) return Drafted{-1, 0.0f};
      const int64_t at = (b * own + (own == 1 ? 0 : row)) * k;
      return children.child(int64_t{b} * growth.width + row, j, tokens.as<int>() + at, log_probs.as<float>() + at);
    });
  }
}

}  // namespace specengine
