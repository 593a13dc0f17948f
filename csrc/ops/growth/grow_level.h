// Grows the candidates of trees by a level, and lays out the rows whose children come next (EAGLE-2 section 4.1).
#pragma once
#include "base/check.h"
#include "ops/select_nodes.h"

namespace specengine {

// Columns of candidates, as SelectNodes takes them: the root, then level after level.
struct CandidateColumns {
  static constexpr char kRecord[] = "CandidateColumns";
  TensorView tokens;   // [B, M] int32
  TensorView parents;  // [B, M] int32, columns; -1 of the root
  TensorView depths;   // [B, M] int32; -1: the request drafts nothing
  TensorView scores;   // [B, M] float32, cumulative log-probabilities
};

// The candidates of a level that are expanded, best first, as rows of a pass: row b * w + i is that of beam[b, i].
struct BeamRows {
  static constexpr char kRecord[] = "BeamRows";
  TensorView beam;       // [B, w] int32, columns of candidates
  TensorView tokens;     // [B * w] int32
  TensorView depths;     // [B * w] int32; -1 of a request that drafts nothing
  TensorView ancestors;  // [B * w, W] int32 bits of expanded nodes, itself included; 0 of a request that drafts nothing
  TensorView above;      // [B * w] int64, the rows of the parents in the level before
};

// The children of row r of `before` are entries 1 to k of row r of the drafted columns, likeliest first; or of row b,
// where all rows of request b have the same children. They become the candidates from column `first` on, row after row.
// Then the best w of them are the rows of `after`, ties to the lower column, numbered `first_node` on; none where w is
// 0.
struct GrowLevel {
  TensorView best_tokens;    // [B * w, 1 + k] or [B, 1 + k] int32, the drafter's tokens; -1: there is no child
  TensorView best_scores;    // as many rows, float32, their log-probabilities
  OptionalTensor token_ids;  // [Vd] int32, the target's tokens; None: the drafter's are the same
  OptionalTensor order;      // [w'] int32, the entries to expand, counted over the level; None: the best ones
  TensorView roots;          // [B, 1] int32; written to column 0 where first is 1
  TensorView known;          // [B] int32, 0: the request drafts nothing
  CandidateColumns candidates;
  BeamRows before;  // tokens, depths and above are not read
  BeamRows after;   // written
  int64_t first, first_node;

  Device validate() const {
    Checker check;
    Dim B{"B"}, M{"M"}, R{"rows"}, K{"1 + k"}, V{"Vd"}, w{"w"}, next{"w'"}, rows{"B * w'"}, W{"W"};
    check(roots, "roots", {DType::kInt32}, {B, 1});
    check(known, "known", {DType::kInt32}, {B});
    check(before.beam, "before.beam", {DType::kInt32}, {B, w});
    check(best_tokens, "best_tokens", {DType::kInt32}, {R, K});
    check(best_scores, "best_scores", {DType::kFloat32}, {R, K});
    check.optional(token_ids, "token_ids", {DType::kInt32}, {V});
    check(candidates.tokens, "candidates.tokens", {DType::kInt32}, {B, M});
    check(candidates.parents, "candidates.parents", {DType::kInt32}, {B, M});
    check(candidates.depths, "candidates.depths", {DType::kInt32}, {B, M});
    check(candidates.scores, "candidates.scores", {DType::kFloat32}, {B, M});
    check(before.ancestors, "before.ancestors", {DType::kInt32}, {B * w, W});
    check(after.beam, "after.beam", {DType::kInt32}, {B, next});
    check(after.tokens, "after.tokens", {DType::kInt32}, {rows});
    check(after.depths, "after.depths", {DType::kInt32}, {rows});
    check(after.ancestors, "after.ancestors", {DType::kInt32}, {rows, W});
    check(after.above, "after.above", {DType::kInt64}, {rows});
    check.optional(order, "order", {DType::kInt32}, {next});
    const int64_t level = w * (K - 1);
    if (R != B * w && R != B) fail("best_tokens: expected ", B * w, " rows or ", B.value, ", got ", R.value);
    if (rows != B * next) fail("after.tokens: expected ", B * next, " rows, got ", rows.value);
    if (first < 1 || first + level > M) {
      fail("first: ", level, " candidates from column ", first, " on do not fit into columns 1 to ", M - 1);
    }
    if (M > kMaxCandidates) fail("candidates: ", M.value, " columns, at most ", kMaxCandidates, " are supported");
    if (next > level) fail("after.beam: ", next.value, " rows of ", level, " candidates");
    if (first_node < 1 || first_node + next > 32 * W) {
      fail("first_node: nodes ", first_node, " to ", first_node + next - 1, " do not fit into ", W.value, " words");
    }
    return check.device();
  }
};

// Limits the depth of each request's tree: `levels` where it is known, 0 where not, at most the tokens that it may
// still commit besides the bonus token; -1 for an idle request.
struct LimitDepths {
  TensorView known;           // [B] int32
  TensorView history_length;  // [B] int32
  TensorView final_length;    // [B] int32, history length at which the request ends
  TensorView active;          // [B] int32, 0: idle
  TensorView limits;          // [B] int32, written
  int64_t levels;

  Device validate() const {
    Checker check;
    Dim B{"B"};
    check(known, "known", {DType::kInt32}, {B});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(final_length, "final_length", {DType::kInt32}, {B});
    check(active, "active", {DType::kInt32}, {B});
    check(limits, "limits", {DType::kInt32}, {B});
    if (levels < 0) fail("levels: expected 0 or more, got ", levels);
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const GrowLevel&);
void run_cuda(const LimitDepths&);
#endif

}  // namespace specengine
