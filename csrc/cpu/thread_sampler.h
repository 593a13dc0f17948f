// Makes a distribution and a token from a node's logits: mask, bias and penalties, temperature, top-k, top-p, min-p,
// then one draw. Its noise has two levels: the first is keyed (seed, position, block of 64 tokens), the second (seed,
// position, token). Top-k and top-p take tokens in the order of their scores before the temperature, because the
// division may round two scores to one; ties go to the lower token id. So both keep the most likely token. A token that
// a step leaves out gets the score -inf.
// cuda/sampling/shaped_row.cuh makes the same choices on CUDA.
#pragma once
#include <numeric>
#include <utility>

#include "cpu/simd.h"
#include "ops/kv_cache.h"
#include "ops/sampling_table.h"
#include "rules/rows.h"

namespace specengine::SPECENGINE_ISA {

// The Sampler of rules/rows.h with one thread: one request's parameters and scratch.
class ThreadSampler {
 public:
  // scores: [V] workspace.  counts: [V] zeros; workspace.
  ThreadSampler(const SamplingTable& table, const TokenHistory& history, int64_t b, int64_t vocab, float* scores,
                int32_t* counts)
      : table_(table), history_(history), b_(b), vocab_(vocab), scores_(scores), counts_(counts) {}

  // Loads and shapes a node's row; false if its scores are no distribution (any NaN or +infinity, or none finite).
  // index: the column of each token, -1: none; nullptr: columns are tokens.  mask: the tokens allowed; nullptr: all.
  // untempered: [V], written if needed.
  bool load(const float* logits, const int32_t* index, const DraftedTree& tree, int node, const uint32_t* mask,
            const Needs& needs, uint64_t* untempered) {
    for (int64_t v = 0; index != nullptr && v < vocab_; ++v) scores_[v] = index[v] < 0 ? -INFINITY : logits[index[v]];
    if (index == nullptr) std::memcpy(scores_, logits, vocab_ * sizeof(float));
    depth_ = tree.depth(node);
    for (int i = depth_; i > 0; node = tree.parent(node)) path_[--i] = tree.token(node);
    add_bias();
    apply_penalties();
    if (mask != nullptr) apply(mask);
    top_token_ = argmax(scores_, vocab_);
    if (!(scores_[top_token_] > -INFINITY && all_below_infinity())) return false;
    if (needs.leaders) find_leaders();
    if (needs.untempered) untempered_total_ = weigh_scores(untempered);
    if (temperature() == 0.0f) return true;
    if (!std::isfinite(scores_[top_token_] / temperature())) return false;  // a low temperature may make it infinite
    keep_top_k();
    keep_top_p();
    for (int64_t v = 0; v < vocab_; ++v) scores_[v] /= temperature();
    drop_below_min_p();
    return true;
  }

  // The token that (seed, position) draws from the row.
  int32_t draw() const {
    return temperature() == 0.0f ? static_cast<int32_t>(top_token_) : draw_keyed(position(), seed());
  }
  int32_t draw_by_weight(const uint64_t* weights) const {
    return specengine::draw_by_weight(*this, weights, vocab_, seed(), position(), NoiseStream::kBlock,
                                      NoiseStream::kToken);
  }
  double uniform(int node) const {
    return specengine::uniform(seed(), root_position(), static_cast<uint32_t>(node), NoiseStream::kAccept);
  }

  float temperature() const { return of<float>(table_.temperature); }
  Leaders leaders() const { return leaders_; }
  int top_token() const { return static_cast<int>(top_token_); }
  uint64_t untempered_total() const { return untempered_total_; }
  bool allows(int token) const { return temperature() == 0.0f || scores_[token] > -INFINITY; }

  uint64_t weight(int token) const {
    if (temperature() == 0.0f) return token == top_token_ ? fixed_point(1.0f) : 0;
    return fixed_point(exp8(splat(scores_[token] - scores_[top_token_]))[0]);
  }
  uint64_t weigh(uint64_t* weights) const {
    if (temperature() != 0.0f) return weigh_scores(weights);
    std::fill(weights, weights + vocab_, 0);
    return weights[top_token_] = fixed_point(1.0f);
  }

  double entropy() const {  // log(W) + sum of w * (top - score) / W
    if (temperature() == 0.0f) return 0;
    const f32x8 top = splat(scores_[top_token_]);
    uint64_t total = 0, moment = 0;
    for (int64_t v = 0; v < vocab_; v += kLanes) {
      const f32x8 x = eight(v), weights = exp8(x - top);
      for (int i = 0; i < kLanes; ++i) {
        total += fixed_point(weights[i]);
        if (weights[i] > 0) moment += fixed_point(weights[i] * (top[i] - x[i]));
      }
    }
    const double sum = static_cast<double>(total);
    return std::log(sum * 0x1p-40) + static_cast<double>(moment) / sum;
  }

  template <typename F>
  uint64_t sum(const F& f) const {
    uint64_t total = 0;
    for (int64_t v = 0; v < vocab_; ++v) total += f(v);
    return total;
  }
  template <typename F>
  int64_t best(int64_t begin, int64_t end, const F& f) const {
    int64_t found = -1;
    double most = -INFINITY;
    for (int64_t i = begin; i < end; ++i) {
      const double value = f(i);
      if (value > most) most = value, found = i;
    }
    return found;
  }
  template <typename F>
  void once(const F& f) const {
    f();
  }

  int64_t vocab() const { return vocab_; }
  uint32_t root_position() const { return static_cast<uint32_t>(of<int32_t>(history_.length) - 1); }
  uint64_t seed() const { return static_cast<uint64_t>(of<int64_t>(table_.seed)); }

 private:
  template <typename T>
  T of(const TensorView& per_request) const {
    return per_request.as<T>()[b_];
  }
  uint32_t position() const { return root_position() + 1 + static_cast<uint32_t>(depth_); }

  void add_bias() const {
    const int32_t* start = table_.bias_start.as<int32_t>() + b_;
    for (int32_t i = start[0]; i < start[1]; ++i)
      scores_[table_.bias_tokens.as<int32_t>()[i]] += table_.bias_values.as<float>()[i];
  }

  void apply_penalties() const {
    const Penalties penalties{of<float>(table_.repetition_penalty), of<float>(table_.presence_penalty),
                              of<float>(table_.frequency_penalty)};
    if (!penalties.any()) return;
    const int32_t* history = history_.tokens.as<int32_t>() + b_ * history_.tokens.shape[1];
    const int64_t length = of<int32_t>(history_.length), prompt = of<int32_t>(history_.prompt_length);
    const auto token_at = [&](int64_t i) { return i < length ? history[i] : path_[i - length]; };
    for (int64_t i = 0; i < length + depth_; ++i) {
      int32_t& count = counts_[token_at(i)];
      count = i < prompt ? kSeen : count + 1;
    }
    for (int64_t i = 0; i < length + depth_; ++i) {
      const int32_t token = token_at(i);
      if (counts_[token] == 0) continue;  // penalised at an earlier occurrence
      scores_[token] = penalties.apply(scores_[token], counts_[token]);
      counts_[token] = 0;
    }
  }

  // After biases and penalties, which leave -inf as it is: a mask forbids whatever they make of a score.
  void apply(const uint32_t* mask) const {
    for (int64_t first = 0; first < vocab_; first += kMaskBits) {
      const uint32_t allowed = mask[first / kMaskBits];
      if (allowed == ~uint32_t{0}) continue;
      const int count = static_cast<int>(std::min<int64_t>(kMaskBits, vocab_ - first));
      for (int i = 0; i < count; ++i) scores_[first + i] = allowed >> i & 1 ? scores_[first + i] : -INFINITY;
    }
  }

  void find_leaders() {
    const int first = top_token();
    const float score = std::exchange(scores_[first], -INFINITY);
    const int second = static_cast<int>(argmax(scores_, vocab_));
    leaders_ = {{first, score}, {second, scores_[second]}};
    scores_[first] = score;
  }

  uint64_t weigh_scores(uint64_t* weights) const {
    const f32x8 top = splat(scores_[top_token_]);
    uint64_t total = 0;
    for (int64_t v = 0; v < vocab_; v += kLanes) {
      const f32x8 eight_weights = exp8(eight(v) - top);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, vocab_ - v); ++i) {
        total += weights[v + i] = fixed_point(eight_weights[i]);
      }
    }
    return total;
  }

  // Eight scores; -inf past the end.
  f32x8 eight(int64_t first) const {
    if (first + kLanes <= vocab_) return load8(scores_ + first);
    f32x8 some = splat(-INFINITY);
    for (int64_t v = first; v < vocab_; ++v) some[v - first] = scores_[v];
    return some;
  }

  bool all_below_infinity() const {  // a NaN is not
    i32x8 good = splat(0) == splat(0);
    for (int64_t v = 0; v < vocab_; v += kLanes) good &= eight(v) < splat(INFINITY);
    for (int i = 0; i < kLanes; ++i) {
      if (!good[i]) return false;
    }
    return true;
  }

  // Keeps the shortest list of tokens, in descending order of score and ascending order of token, whose weight reaches
  // target(weight of all); the target is at most that weight. A radix search over the keys: three reads of the scores
  // and no sorting.
  template <typename Target, typename Weight>
  void keep_smallest_set(const Target& target_of, const Weight& weight_of) const {
    uint32_t threshold = 0, known = 0;  // the threshold key's bits found so far, and a mask of them
    uint64_t above = 0, target = 0;     // above: weight of everything above the threshold
    for (const int shift : {21, 10, 0}) {
      const uint32_t digits = shift == 0 ? 0x3FF : 0x7FF;
      uint64_t bins[0x800] = {};
      for (int64_t v = 0; v < vocab_; v += kLanes) {
        const f32x8 weights = weight_of(eight(v));
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, vocab_ - v); ++i) {
          const uint32_t key = key_of(scores_[v + i]);
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
    for (int64_t v = 0; v < vocab_; ++v) {
      const uint32_t key = key_of(scores_[v]);
      if (key > threshold) continue;
      if (key == threshold && above < target) {  // lower tokens first
        above += tied;
      } else {
        scores_[v] = -INFINITY;
      }
    }
  }

  void keep_top_k() const {
    const int32_t k = of<int32_t>(table_.top_k);
    if (k == 0 || k >= vocab_) return;
    keep_smallest_set([k](uint64_t) { return k * fixed_point(1.0f); }, [](f32x8) { return splat(1.0f); });
  }

  void keep_top_p() const {
    const float top_p = of<float>(table_.top_p);
    if (top_p >= 1.0f) return;
    const f32x8 temperature = splat(this->temperature()), top = splat(scores_[top_token_]) / temperature;
    keep_smallest_set([top_p](uint64_t total) { return enough(top_p, total); },
                      [=](f32x8 x) { return exp8(x / temperature - top); });
  }

  void drop_below_min_p() const {
    const float min_p = of<float>(table_.min_p);
    if (min_p <= 0.0f) return;
    const float top = scores_[top_token_];
    for (int64_t v = 0; v < vocab_; v += kLanes) {
      const f32x8 weights = exp8(eight(v) - splat(top));
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, vocab_ - v); ++i) {
        if (weights[i] < min_p) scores_[v + i] = -INFINITY;
      }
    }
  }

  int32_t draw_keyed(uint32_t position, uint64_t seed) const {
    int64_t block = -1, token = -1;
    double best = 0;
    for (int64_t first = 0; first < vocab_; first += kNoiseBlock) {
      const int64_t end = std::min(vocab_, first + kNoiseBlock);
      f32x8 maxima = splat(-INFINITY);
      for (int64_t v = first; v < end; v += kLanes) maxima = max8(maxima, eight(v));
      const float highest = max_of(maxima);
      if (highest == -INFINITY) continue;
      const auto index = static_cast<uint32_t>(first / kNoiseBlock);
      // A block weighs at most kNoiseBlock times its best token, so most blocks lose before their weights are summed.
      const double most = highest + kMostOfBlock + gumbel(seed, position, index, NoiseStream::kBlock);
      if (block >= 0 && most < best) continue;
      uint64_t total = 0;
      for (int64_t v = first; v < end; v += kLanes) {
        const f32x8 weights = exp8(eight(v) - splat(highest));
        for (int j = 0; j < kLanes; ++j) total += fixed_point(weights[j]);
      }
      const double value = block_value(highest, total, seed, position, index);
      if (block < 0 || value > best) best = value, block = first;
    }
    for (int64_t v = block; v < std::min(vocab_, block + kNoiseBlock); ++v) {
      if (scores_[v] == -INFINITY) continue;
      const double value = token_value(scores_[v], seed, position, static_cast<uint32_t>(v));
      if (token < 0 || value > best) best = value, token = v;
    }
    return static_cast<int32_t>(token);
  }

  static constexpr double kMostOfBlock = 4.16;  // more than log(kNoiseBlock), by more than any rounding

  const SamplingTable& table_;
  const TokenHistory& history_;
  int64_t b_, vocab_;
  float* scores_;
  int32_t* counts_;
  int32_t path_[kMaxNodes];  // tokens from the root's first child down to the node
  int depth_ = 0;
  int64_t top_token_ = 0;
  uint64_t untempered_total_ = 1;
  Leaders leaders_{};
};

}  // namespace specengine::SPECENGINE_ISA
