// Walks the drafted trees with the target's logits: at each node the sampling parameters shape the distribution, the
// rule decides whether to follow a child, and the walk ends with the bonus token.
//
// The CPU samples only nodes on the walk, refuses values out of range and a walk that meets a node without a token.
// CUDA refuses nothing:
//   - such a walk ends there with bonus -1;
//   - a row whose token is -1 is padding and never visited; neither is a row outside row_start;
//   - rule `block` is not held to chains, and is `traversal` of trees;
//   - a request whose root is padding is idle: path_length 0, bonus -1, path all -1; its history is not read.
#pragma once
#include <vector>

#include "base/check.h"
#include "base/isa.h"
#include "base/sampling.h"
#include "ops/kv_cache.h"
#include "ops/sampling_table.h"

namespace specengine {

// What CUDA knows of a row between the launches of rule `match`.
constexpr int kMaxSlices = 16;
struct Candidate {
  double value;
  int64_t token;
};
struct RowState {
  uint32_t threshold;  // top-k, top-p and min-p keep keys above it, and with that key the tokens up to `last`,
  int32_t last;
  float top, min_p;                  // all of them with at least min_p of the weight of the score `top`
  Candidate candidates[kMaxSlices];  // the winners of parts of the row
};
constexpr int64_t kRowStateWords = sizeof(RowState) / sizeof(int64_t);

// Weights per token and request that a rule other than `match` works with; see rules/rows.h.
constexpr int64_t kWeightPlanes = 4;

// The distributions that children were drafted from.
struct DraftLogits {
  TensorView logits;  // [R, C] float32; None: no child was drawn from a distribution
  TensorView rows;    // [M] int32: the row of `logits` that a node's children come from; -1: none
  TensorView index;   // [V] int32: the column of a token; -1: the drafter does not know it; None: column = token, C = V
  bool replacement;   // whether siblings were drawn with replacement

  void validate(Checker& check, Dim& M, Dim& V) const {
    Dim R{"R"}, C{"C"};
    const auto absent = [](const TensorView& t) { return !t.defined() && t.not_a_tensor.empty(); };
    if (absent(logits) && absent(rows) && absent(index)) return;
    check(logits, "draft_logits", {DType::kFloat32}, {R, C});
    check(rows, "draft_rows", {DType::kInt32}, {M});
    check.optional(index, "draft_index", {DType::kInt32}, {V});
    if (!index.defined() && C != V) {
      fail("draft_logits: expected V=", V.value, " columns without a draft_index, got ", C.value);
    }
  }
};

struct VerifyTree : SampledTrees {
  TensorView logits;  // [M, V] float32, one row per node; None where `drawn` is given
  TensorView drawn;   // [M] int32: the target's token at every node where it is known (greedy); -1: there is none
  DraftLogits draft;

  TensorView path;         // [B, N] int32, written: accepted node indices, root first, then -1
  TensorView path_length;  // [B] int32, written: root included, so it is also the number of tokens committed
  TensorView bonus;        // [B] int32, written
  TensorView relaxed;      // [B] int32, written: accepted tokens that the exact rule would have refused

  TensorView scores;      // [B, V] float32, workspace; CUDA: all zero before and after
  TensorView counts;      // [B, V] int32, workspace: all zero before and after
  TensorView row_states;  // [M, 34] int64, workspace; only CUDA with logits and rule `match` needs it
  TensorView weights;     // [B, 4, V] int64, workspace; only rules other than `match` need it

  std::string rule;             // its name in rules/rules.h
  std::vector<double> options;  // the rule's parameters

  Device validate() const {
    Checker check;
    Dim M{"M"}, V{"V"}, B{"B"}, N{"N"};
    check.optional(drawn, "drawn", {DType::kInt32}, {M});
    if (!drawn.defined()) {
      check(logits, "logits", {DType::kFloat32}, {M, V});
    } else if (logits.defined() || !logits.not_a_tensor.empty()) {
      fail("drawn: expected None where logits are given");
    } else if (rule != "match") {
      fail("drawn: rule ", rule, " needs logits, only match can do with tokens");
    }
    SampledTrees::validate(check, M, B);
    check(path, "path", {DType::kInt32}, {B, N});
    check(path_length, "path_length", {DType::kInt32}, {B});
    check(bonus, "bonus", {DType::kInt32}, {B});
    check(relaxed, "relaxed", {DType::kInt32}, {B});
    check(scores, "scores", {DType::kFloat32}, {B, V});
    check(counts, "counts", {DType::kInt32}, {B, V});
    check.optional(row_states, "row_states", {DType::kInt64}, {M, kRowStateWords});
    draft.validate(check, M, V);
    if (rule != "match") check(weights, "weights", {DType::kInt64}, {B, kWeightPlanes, V});
    if (V < 1) fail("scores: expected at least one column");
    return check.device();
  }
};

SPECENGINE_CPU_OP(VerifyTree)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const VerifyTree& op);
#endif

}  // namespace specengine
