// Pass 1, one task per (request, level): the level's best tokens and its log-sum-exp, one read of the logits each.
// Pass 2, one request after the other: the tree, a few hundred integers.
#include "ops/expand_backbone.h"

#include "cpu/parallel_for.h"
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

constexpr int64_t kSkip = 4 * kLanes;  // tokens that are passed over together where none is among the best

// The highest value; sees_nan: whether there is a NaN, which is never "greater".
float highest_of(const float* x, int64_t size, bool& sees_nan) {
  f32x8 best = splat(-INFINITY);
  i32x8 good = best == best;
  int64_t v = 0;
  for (; v + kLanes <= size; v += kLanes) {
    const f32x8 value = load8(x + v);
    good &= value == value;
    best = max8(value, best);
  }
  float highest = max_of(best);
  sees_nan = false;
  for (int i = 0; i < kLanes; ++i) sees_nan = sees_nan || good[i] == 0;
  for (; v < size; ++v) sees_nan = sees_nan || x[v] != x[v], highest = std::max(highest, x[v]);
  return highest;
}

// The `width` largest values in descending order; equal values keep the lower token first. There is no NaN.
void top_k(const float* x, int64_t size, int64_t width, int32_t* tokens, float* values) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < size; begin += kSkip) {
    if (count == width && begin + kSkip <= size) {
      const f32x8 low = max8(load8(x + begin), load8(x + begin + kLanes));
      const f32x8 high = max8(load8(x + begin + 2 * kLanes), load8(x + begin + 3 * kLanes));
      if (!(max_of(max8(low, high)) > values[width - 1])) continue;
    }
    for (int64_t v = begin; v < std::min(size, begin + kSkip); ++v) {
      if (count == width && !(x[v] > values[width - 1])) continue;
      int64_t at = count < width ? count++ : width - 1;
      for (; at > 0 && x[v] > values[at - 1]; --at) values[at] = values[at - 1], tokens[at] = tokens[at - 1];
      values[at] = x[v], tokens[at] = static_cast<int32_t>(v);
    }
  }
}

float log_sum_exp(const float* x, int64_t size, float highest) {
  double total = 0;  // blocks of eight lanes added in order
  int64_t v = 0;
  for (; v + kLanes <= size; v += kLanes) total += sum8(exp8(load8(x + v) - splat(highest)));
  for (; v < size; ++v) total += exp1(x[v] - highest);
  return highest + static_cast<float>(std::log(total));
}

// A level's workspace, of which the CPU, which does not divide the vocabulary, uses the first part.
int64_t level_stride(const ExpandBackbone& op) { return op.top_tokens.shape[2] * op.top_tokens.shape[3]; }

void build_tree(const ExpandBackbone& op, int64_t b) {
  const int64_t T = op.logits.shape[1], C = op.thresholds.shape[0], N = op.trees.tokens.shape[1];
  const int64_t stride = level_stride(op), words = op.trees.ancestors.shape[2];
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
      tokens[count] = level_tokens[i], parents[count] = parent, depths[count] = static_cast<int32_t>(t) + 1;
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
