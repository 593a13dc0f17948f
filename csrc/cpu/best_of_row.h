// The best entries of one row of logits, and its normaliser.
#pragma once
#include "base/check.h"
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {

// The highest value; sees_nan: whether there is a NaN, which is never "greater".
inline float highest_of(const float* x, int64_t size, bool& sees_nan) {
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
inline void top_k(const float* x, int64_t size, int64_t width, int32_t* tokens, float* values) {
  constexpr int64_t kSkip = 4 * kLanes;  // tokens that are passed over together where none is among the best
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

inline float log_sum_exp(const float* x, int64_t size, float highest) {
  constexpr int64_t kTogether = 32 * kLanes;  // so few terms of at most 1 that float32 adds them well enough
  double total = 0;                           // blocks added in order
  int64_t v = 0;
  while (v + kLanes <= size) {
    f32x8 sum = {};
    for (const int64_t end = std::min(size, v + kTogether); v + kLanes <= end; v += kLanes) {
      sum = sum + exp8(load8(x + v) - splat(highest));
    }
    total += sum8(sum);
  }
  for (; v < size; ++v) total += exp1(x[v] - highest);
  return highest + static_cast<float>(std::log(total));
}

// Whether the scores have a distribution: no NaN or +infinity among them, and not all -infinite.
inline bool has_distribution(const float* x, int64_t size) {
  bool sees_nan = false;
  return std::isfinite(highest_of(x, size, sees_nan)) && !sees_nan;
}

// The `width` likeliest tokens with their log-probabilities, of scores that have a distribution.
inline void best_of_row(const float* x, int64_t size, int64_t width, int32_t* tokens, float* log_probs) {
  top_k(x, size, width, tokens, log_probs);
  const float normaliser = log_sum_exp(x, size, log_probs[0]);
  for (int64_t i = 0; i < width; ++i) log_probs[i] -= normaliser;
}

// Fails for a row without a distribution. indices: of the row.
template <typename... Indices>
[[noreturn]] void refuse_row(const float* x, int64_t size, const Indices&... indices) {
  std::ostringstream row;
  ((row << indices << ", "), ...);
  for (int64_t v = 0; v < size; ++v) {
    if (x[v] != x[v]) fail("logits: NaN at [", row.str(), v, "]");
  }
  fail("logits: [", row.str().substr(0, row.str().size() - 2), "] has no finite highest score");
}

}  // namespace specengine::SPECENGINE_ISA
