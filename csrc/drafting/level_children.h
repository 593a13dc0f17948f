// The likeliest tokens of rows of logits and their log-probabilities, for ops that draft levels from logits.
#pragma once
#include <algorithm>
#include <stdexcept>

#include "cpu/passes/workspace.h"
#include "ops/kv_cache.h"
#include "ops/top_tokens.h"

namespace specengine {

// Brings x to the form that a projection multiplies.
inline void prepare_rows(const TensorView& x, const Projection& reader, const TensorView& out) {
  if (reader.quantises_rows()) return run_cpu(QuantiseRows{x, out});
  std::copy_n(x.as<float>(), x.numel(), out.as<float>());
}

// `count` rows from `first` on of a contiguous float tensor.
inline TensorView rows_of(const TensorView& x, int64_t first, int64_t count) {
  TensorView part = x;
  part.shape[0] = count, part.data = x.as<float>() + first * x.strides[0];
  return part;
}

// A tensor [M, ..] with all dimensions but the first flattened.
inline TensorView as_rows(const TensorView& x) { return tensor(x.data, x.dtype, {x.shape[0], x.numel() / x.shape[0]}); }

// Where the children of a level's requests go.
struct WrittenLevels {
  TensorView children;        // [B, T, k] int32
  TensorView scores;          // [B, T, k] float32
  OptionalTensor vocabulary;  // [V] int32, the token of each logit; None: the same

  void validate(Checker& check, Dim& B, Dim& T, Dim& k, int64_t V) const {
    check(children, "children", {DType::kInt32}, {B, T, k});
    check(scores, "scores", {DType::kFloat32}, {B, T, k});
    const int64_t most = std::min<int64_t>(kMaxNodes - 1, V);
    if (T < 1 || k < 1 || k > most) {
      fail("children: expected at least one level of 1 to ", most, " tokens, got ", T.value, " of ", k.value);
    }
  }
};

// The best k of up to R rows of logits.
class LevelChildren {
 public:
  LevelChildren(int64_t R, int64_t k, Workspace& space)
      : tokens_(space.ints({R, k})), log_probs_(space.floats({R, k})) {}

  // Writes the levels from `level` on, of logits [levels B, V], level after level.
  // cause: the argument of the caller that leads to the logits.
  void write(const TensorView& logits, const WrittenLevels& to, int64_t level,
             const char* cause = "hidden_states") const {
    try {
      run_cpu(TopTokens{logits, tokens_, log_probs_});
    } catch (const std::invalid_argument& error) {  // the logits that it names are no argument of the caller
      fail(cause, ": they lead to no distribution; ", error.what());
    }
    const int64_t B = to.children.shape[0], T = to.children.shape[1], k = tokens_.shape[1];
    const int32_t* vocabulary = to.vocabulary.defined() ? to.vocabulary.as<int32_t>() : nullptr;
    for (int64_t row = 0; row < logits.shape[0]; ++row) {
      const int64_t first = (row % B * T + level + row / B) * k;
      for (int64_t i = 0; i < k; ++i) {
        to.children.as<int32_t>()[first + i] = vocabulary ? vocabulary[token(row, i)] : token(row, i);
        to.scores.as<float>()[first + i] = log_probs_.as<float>()[row * k + i];
      }
    }
  }

  // A child of the last write, as a logit's number.
  int32_t token(int64_t row, int64_t i) const { return tokens_.as<int32_t>()[row * tokens_.shape[1] + i]; }

 private:
  TensorView tokens_, log_probs_;
};

}  // namespace specengine
