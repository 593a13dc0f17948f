// From a node's logits to the target's token: bias and penalties, temperature, top-k, top-p, min-p, then one draw with
// noise keyed by (seed, position, token). The order of the steps is the one users of such parameters expect
// (bias, penalties, temperature, top-k, top-p, min-p); ties go to the lower token id everywhere.
#pragma once
#include "base/philox.h"
#include "cpu/simd.h"
#include "ops/verify_tree.h"

namespace specengine::SPECENGINE_ISA {

constexpr int32_t kNoToken = -1;

// One sequence's parameters and scratch, and the tokens its penalties count: history, then the walked path.
struct Sampler {
  const VerifyTree& op;
  int64_t b, vocab;
  float* scores;    // [V] processed logits; workspace
  float* weights;   // [V] exp(score - highest), 0 where filtered out; workspace
  int32_t* counts;  // [V] zeros; workspace

  Sampler(const VerifyTree& op, int64_t b)
      : op(op),
        b(b),
        vocab(op.scores.shape[2]),
        scores(op.scores.as<float>() + b * 2 * vocab),
        weights(scores + vocab),
        counts(op.counts.as<int32_t>() + b * vocab) {}

  template <typename T>
  T of(const TensorView& per_sequence) const {
    return per_sequence.as<T>()[b];
  }

  // The token drawn at one node, kNoToken where the parameters drove the scores out of float32; path holds the tokens
  // from the root's first child down to the node.
  int32_t draw(const float* logits, const int32_t* path, int64_t depth) const {
    std::memcpy(scores, logits, vocab * sizeof(float));
    add_bias();
    apply_penalties(path, depth);
    const float temperature = of<float>(op.temperature);
    const int32_t best = static_cast<int32_t>(argmax(scores, vocab));
    const float top = temperature == 0.0f ? scores[best] : scores[best] / temperature;
    if (!std::isfinite(top)) return kNoToken;
    if (temperature == 0.0f) return best;
    weigh(temperature, top);
    keep_top_k();
    keep_top_p();
    drop_below_min_p();
    return draw_keyed(static_cast<uint32_t>(of<int32_t>(op.history_length) + depth));
  }

 private:
  void add_bias() const {
    const int32_t* start = op.bias_start.as<int32_t>() + b;
    for (int32_t i = start[0]; i < start[1]; ++i)
      scores[op.bias_tokens.as<int32_t>()[i]] += op.bias_values.as<float>()[i];
  }

  void apply_penalties(const int32_t* path, int64_t depth) const {
    const float repetition = of<float>(op.repetition_penalty), presence = of<float>(op.presence_penalty);
    const float frequency = of<float>(op.frequency_penalty);
    if (repetition == 1.0f && presence == 0.0f && frequency == 0.0f) return;
    const int32_t* history = op.history.as<int32_t>() + b * op.history.shape[1];
    const int64_t length = of<int32_t>(op.history_length), prompt = of<int32_t>(op.prompt_length);
    constexpr int32_t kSeen = 1 << 30;  // marks a token that occurs at all; the bits below count output tokens
    const auto token_at = [&](int64_t i) { return i < length ? history[i] : path[i - length]; };
    for (int64_t i = 0; i < length + depth; ++i) {
      int32_t& count = counts[token_at(i)];
      count = (count | kSeen) + (i >= prompt ? 1 : 0);
    }
    for (int64_t i = 0; i < length + depth; ++i) {
      const int32_t token = token_at(i);
      if (counts[token] == 0) continue;  // done at an earlier occurrence
      const int32_t count = counts[token] & ~kSeen;
      counts[token] = 0;
      float& score = scores[token];
      score = score > 0 ? score / repetition : score * repetition;
      score -= frequency * static_cast<float>(count) + (count > 0 ? presence : 0.0f);
    }
  }

  void weigh(float temperature, float top) const {
    int64_t v = 0;
    for (; v + kLanes <= vocab; v += kLanes) {
      const f32x8 score = load8(scores + v) / splat(temperature);
      store8(scores + v, score);
      store8(weights + v, exp8(score - splat(top)));
    }
    for (; v < vocab; ++v) {
      scores[v] /= temperature;
      weights[v] = exp1(scores[v] - top);
    }
  }

  // Order-preserving bits: a larger float has a larger key, and -0 that of 0.
  static uint32_t key_of(float x) {
    x += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }

  // Keeps the shortest list, in descending order of score and ascending order of token, whose measure reaches
  // `target`; the rest gets weight 0. A radix search over the keys: three reads of the scores, no sorting.
  template <typename Measure>
  void keep_smallest_set(double target, const Measure& measure) const {
    uint32_t prefix = 0, known = 0;  // bits of the threshold key found so far, and which bits they are
    double above = 0;                // measure of everything certainly above the threshold
    for (const int shift : {21, 10, 0}) {
      const int bits = shift == 0 ? 10 : 11;
      double bins[2048] = {};
      for (int64_t v = 0; v < vocab; ++v) {
        const uint32_t key = key_of(scores[v]);
        if (weights[v] > 0 && (key & known) == prefix) bins[key >> shift & ((1u << bits) - 1)] += measure(v);
      }
      int bin = (1 << bits) - 1, last = -1;
      for (; bin >= 0; --bin) {
        if (bins[bin] == 0) continue;
        last = bin;
        if (above + bins[bin] >= target) break;
        above += bins[bin];
      }
      if (bin < 0) {  // rounding kept the sum below the target: everything stays
        if (shift == 21 || last < 0) return;
        above -= bins[last], bin = last;
      }
      prefix |= static_cast<uint32_t>(bin) << shift;
      known |= ((1u << bits) - 1) << shift;
    }
    for (int64_t v = 0; v < vocab; ++v) {
      const uint32_t key = key_of(scores[v]);
      if (key > prefix || weights[v] == 0) continue;
      if (key == prefix && above < target) {  // ties at the threshold: lower tokens first
        above += measure(v);
      } else {
        weights[v] = 0;
      }
    }
  }

  void keep_top_k() const {
    const int32_t k = of<int32_t>(op.top_k);
    if (k > 0 && k < vocab) keep_smallest_set(k, [](int64_t) { return 1.0; });
  }

  void keep_top_p() const {
    const float top_p = of<float>(op.top_p);
    if (top_p >= 1.0f) return;
    double total = 0;
    for (int64_t v = 0; v < vocab; ++v) total += weights[v];
    keep_smallest_set(top_p * total, [this](int64_t v) { return static_cast<double>(weights[v]); });
  }

  void drop_below_min_p() const {
    const float min_p = of<float>(op.min_p);
    if (min_p <= 0.0f) return;
    for (int64_t v = 0; v < vocab; ++v) {  // the highest weight is 1
      if (weights[v] < min_p) weights[v] = 0;
    }
  }

  static double gumbel(uint64_t seed, uint32_t position, uint32_t index, NoiseStream stream) {
    return -std::log(-std::log((random_bits(seed, position, index, stream) + 0.5) * 0x1p-32));
  }

  // Two levels: first the block of 64 tokens, by its total weight, then the token inside it. Exact by the chain rule,
  // with V/64 + 64 random numbers instead of V.
  int32_t draw_keyed(uint32_t position) const {
    const uint64_t seed = static_cast<uint64_t>(of<int64_t>(op.seed));
    int64_t block = -1;
    double best = 0;
    for (int64_t first = 0; first < vocab; first += kNoiseBlock) {
      double total = 0;
      for (int64_t v = first; v < std::min(vocab, first + kNoiseBlock); ++v) total += weights[v];
      if (total == 0) continue;
      const uint32_t index = static_cast<uint32_t>(first / kNoiseBlock);
      const double value = std::log(total) + gumbel(seed, position, index, NoiseStream::kBlock);
      if (block < 0 || value > best) best = value, block = first;
    }
    int64_t token = -1;
    for (int64_t v = block; v < std::min(vocab, block + kNoiseBlock); ++v) {
      if (weights[v] == 0) continue;
      const double value = std::log(static_cast<double>(weights[v])) +
                           gumbel(seed, position, static_cast<uint32_t>(v), NoiseStream::kToken);
      if (token < 0 || value > best) best = value, token = v;
    }
    return static_cast<int32_t>(token);
  }
};

}  // namespace specengine::SPECENGINE_ISA
