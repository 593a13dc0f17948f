// Pass 1, one task per (request, level): the level's best tokens and its log-sum-exp, one read of the logits each.
// Pass 2, one request after the other: the tree, a few hundred integers.
#include "ops/expand_backbone.h"

#include "cpu/best_of_row.h"
#include "cpu/parallel_for.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// A level's workspace, of which the CPU, which does not divide the vocabulary, uses the first part.
int64_t level_stride(const ExpandBackbone& op) { return op.top_tokens.shape[2] * op.top_tokens.shape[3]; }

void build_tree(const ExpandBackbone& op, int64_t b) {
  const int64_t T = op.logits.shape[1], C = op.thresholds.shape[0], N = op.trees.tokens.shape[1];
  const int64_t stride = level_stride(op), words = op.trees.ancestors.shape[2];
  const int32_t* ids = op.token_ids.given() ? op.token_ids.as<int32_t>() : nullptr;
  int32_t* tokens = op.trees.tokens.as<int32_t>() + b * N;
  int32_t* parents = op.trees.parents.as<int32_t>() + b * N;
  int32_t* depths = op.trees.depths.as<int32_t>() + b * N;
  float* scores = op.trees.scores.as<float>() + b * N;
  uint32_t* ancestors = op.trees.ancestors.as<uint32_t>() + b * N * words;
  std::fill(tokens, tokens + N, -1), std::fill(parents, parents + N, -1), std::fill(depths, depths + N, -1);
  std::fill(scores, scores + N, 0.0f), std::fill(ancestors, ancestors + N * words, 0u);
  op.trees.node_counts.as<int32_t>()[b] = 0;
  if (op.root.as<int32_t>()[b] < 0) return;

  tokens[0] = op.root.as<int32_t>()[b], depths[0] = 0, ancestors[0] = 1;
  int32_t backbone = 0, count = 1;
  for (int64_t t = 0; t < T; ++t) {
    const int32_t* level_tokens = op.top_tokens.as<int32_t>() + (b * T + t) * stride;
    const float* log_probs = op.top_scores.as<float>() + (b * T + t) * stride;
    int64_t bin = 0;
    while (bin < C && std::exp(log_probs[0]) > op.thresholds.as<float>()[bin]) ++bin;
    const int32_t parent = backbone;
    backbone = count;
    for (int32_t i = 0; i < op.widths.as<int32_t>()[bin]; ++i, ++count) {
      tokens[count] = ids == nullptr ? level_tokens[i] : ids[level_tokens[i]];
      parents[count] = parent, depths[count] = static_cast<int32_t>(t) + 1;
      scores[count] = scores[parent] + log_probs[i];
      for (int64_t w = 0; w < words; ++w) ancestors[count * words + w] = ancestors[parent * words + w];
      ancestors[count * words + count / 32] |= 1u << (count % 32);
    }
  }
  op.trees.node_counts.as<int32_t>()[b] = count;
}

}  // namespace

void run(const ExpandBackbone& op) {
  const int64_t B = op.logits.shape[0], T = op.logits.shape[1], V = op.logits.shape[2], width = op.top_tokens.shape[3];
  for (int64_t i = 0; i < op.widths.shape[0]; ++i) {
    const int32_t w = op.widths.as<int32_t>()[i];
    if (w < 1 || w > width) fail("widths: entry ", i, " is ", w, ", expected 1 to ", width);
  }
  for (int64_t i = 0; i < op.thresholds.shape[0]; ++i) {
    const float* x = op.thresholds.as<float>() + i;
    if (!(x[0] > (i > 0 ? x[-1] : -INFINITY)))
      fail("thresholds: entry ", i, " is ", x[0], ", expected ascending numbers");
  }
  const auto is_idle = [&](int64_t i) { return op.root.as<int32_t>()[i / T] < 0; };
  for (int64_t i = 0; i < B * T; ++i) {
    if (is_idle(i)) continue;
    const float* x = op.logits.as<float>() + i * V;
    bool sees_nan = false;
    const float highest = highest_of(x, V, sees_nan);
    for (int64_t v = 0; sees_nan && v < V; ++v) {
      if (x[v] != x[v]) fail("logits: NaN at [", i / T, ", ", i % T, ", ", v, "]");
    }
    if (!std::isfinite(highest)) fail("logits: [", i / T, ", ", i % T, "] has no finite highest score");
  }
  parallel_for(B * T, [&](int64_t i) {
    if (is_idle(i)) return;
    const float* x = op.logits.as<float>() + i * V;
    float* values = op.top_scores.as<float>() + i * level_stride(op);
    top_k(x, V, width, op.top_tokens.as<int32_t>() + i * level_stride(op), values);
    const float normaliser = log_sum_exp(x, V, values[0]);
    for (int64_t j = 0; j < width; ++j) values[j] -= normaliser;
  });
  for (int64_t b = 0; b < B; ++b) build_tree(op, b);
}

}  // namespace specengine::SPECENGINE_ISA
