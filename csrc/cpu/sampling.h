// From a node's logits to the target's token: bias and penalties, temperature, top-k, top-p, min-p, then one draw with
// noise keyed by (seed, position, token). The order of the steps is the one users of such parameters expect; ties go to
// the lower token id everywhere. What a step leaves out gets the score -inf.
#pragma once
#include <numeric>

#include "base/sampling.h"
#include "cpu/simd.h"
#include "ops/verify_tree.h"

namespace specengine::SPECENGINE_ISA {

// One sequence's parameters and scratch, and the tokens its penalties count: history, then the walked path.
struct Sampler {
  const VerifyTree& op;
  int64_t b, vocab;
  float* scores;    // [V] workspace
  int32_t* counts;  // [V] zeros; workspace

  Sampler(const VerifyTree& op, int64_t b)
      : op(op),
        b(b),
        vocab(op.scores.shape[1]),
        scores(op.scores.as<float>() + b * vocab),
        counts(op.counts.as<int32_t>() + b * vocab) {}

  template <typename T>
  T of(const TensorView& per_sequence) const {
    return per_sequence.as<T>()[b];
  }

  // The token drawn at one node, kNoToken where the scores are no distribution (any NaN or infinity, none finite);
  // path holds the tokens from the root's first child down to the node.
  int32_t draw(const float* logits, const int32_t* path, int64_t depth) const {
    std::memcpy(scores, logits, vocab * sizeof(float));
    add_bias();
    apply_penalties(path, depth);
    const float temperature = of<float>(op.temperature);
    if (temperature != 0.0f) {
      for (int64_t v = 0; v < vocab; ++v) scores[v] /= temperature;
    }
    const int64_t best = argmax(scores, vocab);
    if (!(scores[best] > -INFINITY && all_below_infinity())) return kNoToken;
    if (temperature == 0.0f) return static_cast<int32_t>(best);
    const float top = scores[best];
    keep_top_k();
    keep_top_p(top);
    drop_below_min_p(top);
    return draw_keyed(static_cast<uint32_t>(of<int32_t>(op.history_length) + depth));
  }

 private:
  void add_bias() const {
    const int32_t* start = op.bias_start.as<int32_t>() + b;
    for (int32_t i = start[0]; i < start[1]; ++i)
      scores[op.bias_tokens.as<int32_t>()[i]] += op.bias_values.as<float>()[i];
  }

  void apply_penalties(const int32_t* path, int64_t depth) const {
    const Penalties penalties{of<float>(op.repetition_penalty), of<float>(op.presence_penalty),
                              of<float>(op.frequency_penalty)};
    if (!penalties.any()) return;
    const int32_t* history = op.history.as<int32_t>() + b * op.history.shape[1];
    const int64_t length = of<int32_t>(op.history_length), prompt = of<int32_t>(op.prompt_length);
    const auto token_at = [&](int64_t i) { return i < length ? history[i] : path[i - length]; };
    for (int64_t i = 0; i < length + depth; ++i) {
      int32_t& count = counts[token_at(i)];
      count = i < prompt ? kSeen : count + 1;
    }
    for (int64_t i = 0; i < length + depth; ++i) {
      const int32_t token = token_at(i);
      if (counts[token] == 0) continue;  // done at an earlier occurrence
      scores[token] = penalties.apply(scores[token], counts[token]);
      counts[token] = 0;
    }
  }

  // Eight scores; -inf past the end.
  f32x8 eight(int64_t first) const {
    if (first + kLanes <= vocab) return load8(scores + first);
    f32x8 some = splat(-INFINITY);
    for (int64_t v = first; v < vocab; ++v) some[v - first] = scores[v];
    return some;
  }

  bool all_below_infinity() const {  // which a NaN is not
    i32x8 good = splat(0) == splat(0);
    for (int64_t v = 0; v < vocab; v += kLanes) good &= eight(v) < splat(INFINITY);
    for (int i = 0; i < kLanes; ++i) {
      if (!good[i]) return false;
    }
    return true;
  }

  // Keeps the shortest list, in descending order of score and ascending order of token, whose weight reaches
  // target(weight of all), which is no more than that. A radix search over the keys: three reads of the scores, no
  // sorting.
  template <typename Target, typename Weight>
  void keep_smallest_set(const Target& target_of, const Weight& weight_of) const {
    uint32_t threshold = 0, known = 0;  // bits of the threshold key found so far, and which bits they are
    uint64_t above = 0, target = 0;     // above: weight of everything above the threshold
    for (const int shift : {21, 10, 0}) {
      const uint32_t digits = shift == 0 ? 0x3FF : 0x7FF;
      uint64_t bins[0x800] = {};
      for (int64_t v = 0; v < vocab; v += kLanes) {
        const f32x8 weights = weight_of(eight(v));
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, vocab - v); ++i) {
          const uint32_t key = key_of(scores[v + i]);
          if ((key & known) == threshold) bins[key >> shift & digits] += fixed_point(weights[i]);
        }
      }
      if (known == 0) target = target_of(std::accumulate(bins, bins + 0x800, uint64_t{0}));
      uint32_t bin = digits;
      while (above + bins[bin] < target) above += bins[bin--];
      threshold |= bin << shift;
      known |= digits << shift;
    }
    const uint64_t tied = fixed_point(weight_of(splat(score_of(threshold)))[0]);
    for (int64_t v = 0; v < vocab; ++v) {
      const uint32_t key = key_of(scores[v]);
      if (key > threshold) continue;
      if (key == threshold && above < target) {  // lower tokens first
        above += tied;
      } else {
        scores[v] = -INFINITY;
      }
    }
  }

  void keep_top_k() const {
    const int32_t k = of<int32_t>(op.top_k);
    if (k == 0 || k >= vocab) return;
    keep_smallest_set([k](uint64_t) { return k * fixed_point(1.0f); }, [](f32x8) { return splat(1.0f); });
  }

  void keep_top_p(float top) const {
    const float top_p = of<float>(op.top_p);
    if (top_p >= 1.0f) return;
    keep_smallest_set([top_p](uint64_t total) { return enough(top_p, total); },
                      [top](f32x8 x) { return exp8(x - splat(top)); });
  }

  void drop_below_min_p(float top) const {
    const float min_p = of<float>(op.min_p);
    if (min_p <= 0.0f) return;
    for (int64_t v = 0; v < vocab; v += kLanes) {
      const f32x8 weights = exp8(eight(v) - splat(top));
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, vocab - v); ++i) {
        if (weights[i] < min_p) scores[v + i] = -INFINITY;
      }
    }
  }

  int32_t draw_keyed(uint32_t position) const {
    const uint64_t seed = static_cast<uint64_t>(of<int64_t>(op.seed));
    int64_t block = -1, token = -1;
    double best = 0;
    for (int64_t first = 0; first < vocab; first += kNoiseBlock) {
      const int64_t end = std::min(vocab, first + kNoiseBlock);
      f32x8 maxima = splat(-INFINITY);
      for (int64_t v = first; v < end; v += kLanes) maxima = max8(maxima, eight(v));
      const float highest = max_of(maxima);
      if (highest == -INFINITY) continue;
      uint64_t total = 0;
      for (int64_t v = first; v < end; v += kLanes) {
        const f32x8 weights = exp8(eight(v) - splat(highest));
        for (int j = 0; j < kLanes; ++j) total += fixed_point(weights[j]);
      }
      const double value = block_value(highest, total, seed, position, static_cast<uint32_t>(first / kNoiseBlock));
      if (block < 0 || value > best) best = value, block = first;
    }
    for (int64_t v = block; v < std::min(vocab, block + kNoiseBlock); ++v) {
      if (scores[v] == -INFINITY) continue;
      const double value = token_value(scores[v], seed, position, static_cast<uint32_t>(v));
      if (token < 0 || value > best) best = value, token = v;
    }
    return static_cast<int32_t>(token);
  }
};

}  // namespace specengine::SPECENGINE_ISA
