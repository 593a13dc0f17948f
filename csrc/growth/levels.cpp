#include "growth/levels.h"

#include "cpu/passes/workspace.h"
#include "growth/select.h"
#include "growth/shapes.h"
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

// Raises ValueError for rows whose nodes are no candidates, or deeper than a tree.
template <class Op>
void check_beam(const Op& op) {
  const int64_t columns = op.candidates.tokens.shape[1];
  for (int64_t row = 0; row < op.before.beam.numel(); ++row) {
    const int64_t column = op.before.beam.template as<int32_t>()[row];
    if (column < 0 || column >= columns) {
      fail("before.beam: entry ", row, " is ", column, ", expected 0 to ", columns - 1);
    }
    const int64_t entry = row / op.before.beam.shape[1] * columns + column;
    const int32_t depth = op.candidates.depths.template as<int32_t>()[entry];
    if (op.first > 1 && depth >= kMaxNodes) {  // before, the root's is not written yet
      fail("candidates.depths: entry ", entry, " is ", depth, ", expected less than ", kMaxNodes);
    }
  }
}

}  // namespace

void run_cpu(const GrowLevel& op) {
  check_beam(op);
  const int64_t B = op.roots.shape[0], shared = op.best_tokens.shape[0] == B;
  const Growth growth = growth_of(op, op.best_tokens.shape[1], true);
  for (int b = 0; b < B; ++b) {
    grow_level(growth, b, [&](int row, int j) {
      const int64_t at = (shared ? b : int64_t{b} * growth.width + row) * growth.children + j;
      return Drafted{op.best_tokens.as<int>()[at], op.best_scores.as<float>()[at]};
    });
  }
}

void add_level(const ExpandLevel& op, bool shared) {
  const int64_t B = op.roots.shape[0];
  const Growth growth = growth_of(op, op.parts.tokens.shape[2], true);
  const LikeliestChildren children = children_of(op.level, B * growth.width);
  for (int b = 0; b < B; ++b) {
    grow_level(growth, b, [&](int row, int j) {
      if (op.known.as<int>()[b] <= 0) return Drafted{-1, 0.0f};
      const int64_t own = int64_t{b} * growth.width + row, at = (shared ? b : own) * growth.children;
      return children.child(own, j, op.parts.tokens.as<int>() + at, op.parts.scores.as<float>() + at);
    });
  }
}

void run_cpu(const ExpandLevel& op) {
  const int64_t B = op.roots.shape[0], k = op.parts.tokens.shape[2];
  if (B == 0) return;
  check_beam(op);
  std::vector<float> sums;
  const TensorView logits = summed(op.level, sums);
  const auto best = [&](const TensorView& part) { return tensor(part.data, part.dtype, {logits.shape[0], k}); };
  run_cpu(TopTokens{logits, best(op.parts.tokens), best(op.parts.scores), op.known});
  add_level(op, logits.shape[0] == B);
}

}  // namespace specengine
