// The likeliest tokens of rows of logits and their log-probabilities, for ops that draft levels from logits.
#pragma once
#include <algorithm>
#include <stdexcept>

#include "cpu/passes/workspace.h"
#include "ops/expand_backbone.h"

namespace specengine {

// Brings x to the form that a projection multiplies.
inline void prepare_rows(const TensorView& x, const Projection& reader, const TensorView& out) {
  if (reader.quantised()) return run_cpu(QuantiseRows{x, out});
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

// The best k of up to R rows of V logits. Every row is a tree of one level to expand_backbone, whose kernel finds them.
class LevelChildren {
 public:
  LevelChildren(int64_t R, int64_t V, int64_t k, Workspace& space)
      : k_(k),
        root_(space.ints({R})),
        thresholds_(space.floats({0})),
        widths_(space.ints({1})),
        arrived_(space.ints({R})),
        top_tokens_(space.ints({R, 1, parts_of(V), k})),
        top_scores_(space.floats({R, 1, parts_of(V), k})),
        sums_(space.floats({R, 1, parts_of(V)})),
        trees_{space.ints({R, 1 + k}),
               space.ints({R, 1 + k}),
               space.ints({R, 1 + k}),
               space.floats({R, 1 + k}),
               space.ints({R, 1 + k, k / 32 + 1}),
               space.ints({R})} {}

  // Once, after the memory is there.
  void begin() const {
    std::fill_n(root_.as<int32_t>(), root_.shape[0], 0);
    std::fill_n(arrived_.as<int32_t>(), root_.shape[0], 0);
    *widths_.as<int32_t>() = static_cast<int32_t>(k_);
  }

  // Writes the levels from `level` on, of logits [levels B, V], level after level.
  // cause: the argument of the caller that leads to the logits.
  void write(const TensorView& logits, const WrittenLevels& to, int64_t level,
             const char* cause = "hidden_states") const {
    const TensorView trees_of_one = tensor(logits.data, logits.dtype, {logits.shape[0], 1, logits.shape[1]});
    try {
      run_cpu(
          ExpandBackbone{trees_of_one, root_, thresholds_, widths_, trees_, top_tokens_, top_scores_, sums_, arrived_});
    } catch (const std::invalid_argument& error) {  // the logits that it names are no argument of the caller
      fail(cause, ": they lead to no distribution; ", error.what());
    }
    const int64_t B = to.children.shape[0], T = to.children.shape[1];
    const int32_t* vocabulary = to.vocabulary.defined() ? to.vocabulary.as<int32_t>() : nullptr;
    for (int64_t row = 0; row < logits.shape[0]; ++row) {
      const int64_t first = (row % B * T + level + row / B) * k_;
      for (int64_t i = 0; i < k_; ++i) {
        const int32_t best = token(row, i);
        to.children.as<int32_t>()[first + i] = vocabulary ? vocabulary[best] : best;
        to.scores.as<float>()[first + i] = trees_.scores.as<float>()[row * (1 + k_) + 1 + i];
      }
    }
  }

  // A child of the last write, as a logit's number.
  int32_t token(int64_t row, int64_t i) const { return trees_.tokens.as<int32_t>()[row * (1 + k_) + 1 + i]; }

 private:
  static int64_t parts_of(int64_t V) { return (V + kVocabularyPart - 1) / kVocabularyPart; }

  int64_t k_;
  TensorView root_, thresholds_, widths_, arrived_, top_tokens_, top_scores_, sums_;
  BackboneTrees trees_;
};

}  // namespace specengine
