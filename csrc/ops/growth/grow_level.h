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
  TensorView depths;   // [B, M] int32; -1: there is no such child, or the request drafts nothing
  TensorView scores;   // [B, M] float32, cumulative: log-probabilities, with a confidence logarithms of chances
};

// The candidates of a level that are expanded, best first, as rows of a pass: row b * w + i is that of beam[b, i].
// A row of a missing child, or of a request that drafts nothing, does not exist. ExpandLevel and GrowLevel on the CPU
// write token 0, depth 0 and its bits there, as a pass on the CPU refuses others.
struct BeamRows {
  static constexpr char kRecord[] = "BeamRows";
  TensorView beam;       // [B, w] int32, columns of candidates
  TensorView tokens;     // [B * w] int32; -1 of a row that does not exist
  TensorView depths;     // [B * w] int32; -1 of a row that does not exist
  TensorView ancestors;  // [B * w, W] int32 bits of expanded nodes, itself included; 0 of a row that does not exist
  TensorView above;      // [B * w] int64, the rows of the parents in the level before
};

// Which children a level has, and which of these entries are expanded.
struct LevelEntries {
  static constexpr char kRecord[] = "LevelEntries";

  OptionalTensor order;   // [w'] int32, the entries to expand, counted over the level; None: the best ones
  OptionalTensor listed;  // [E] int32, which of the w k children, row after row, the level has; None: all
};

// Checks what an op that grows a level says of it; returns how many rows have k children each.
template <typename Op>
int64_t check_growth(Checker& check, const Op& op, Dim& B, int64_t k) {
  Dim M{"M"}, V{"Vd"}, w{"w"}, next{"w'"}, rows{"B * w'"}, W{"W"}, E{"E"};
  check(op.roots, "roots", {DType::kInt32}, {B, 1});
  check(op.known, "known", {DType::kInt32}, {B});
  check(op.before.beam, "before.beam", {DType::kInt32}, {B, w});
  check.optional(op.token_ids, "token_ids", {DType::kInt32}, {V});
  check(op.candidates.tokens, "candidates.tokens", {DType::kInt32}, {B, M});
  check(op.candidates.parents, "candidates.parents", {DType::kInt32}, {B, M});
  check(op.candidates.depths, "candidates.depths", {DType::kInt32}, {B, M});
  check(op.candidates.scores, "candidates.scores", {DType::kFloat32}, {B, M});
  check(op.before.ancestors, "before.ancestors", {DType::kInt32}, {B * w, W});
  check(op.after.beam, "after.beam", {DType::kInt32}, {B, next});
  check(op.after.tokens, "after.tokens", {DType::kInt32}, {rows});
  check(op.after.depths, "after.depths", {DType::kInt32}, {rows});
  check(op.after.ancestors, "after.ancestors", {DType::kInt32}, {rows, W});
  check(op.after.above, "after.above", {DType::kInt64}, {rows});
  check.optional(op.entries.order, "order", {DType::kInt32}, {next});
  check.optional(op.origin, "origin", {DType::kInt64}, {B * w});
  check.optional(op.entries.listed, "listed", {DType::kInt32}, {E});
  const int64_t level = op.entries.listed.given() ? E.value : w * k, first = op.first, first_node = op.first_node;
  if (rows != B * next) fail("after.tokens: expected ", B * next, " rows, got ", rows.value);
  if (first < 1 || first + level > M) {
    fail("first: ", level, " candidates from column ", first, " on do not fit into columns 1 to ", M - 1);
  }
  if (M > kMaxCandidates) fail("candidates: ", M.value, " columns, at most ", kMaxCandidates, " are supported");
  if (next > level) fail("after.beam: ", next.value, " rows of ", level, " candidates");
  if (first_node < 1 || first_node + next > 32 * W) {
    fail("first_node: nodes ", first_node, " to ", first_node + next - 1, " do not fit into ", W.value, " words");
  }
  return B * w;
}

// The children of row r of `before` are row r of the drafted children, likeliest first; or row b, where all rows of
// request b have the same children. They become the candidates from column `first` on, row after row.
// Then the best w of them are the rows of `after`, ties to the lower column, numbered `first_node` on; none where w is
// 0.
struct GrowLevel {
  TensorView best_tokens;    // [B * w, k] or [B, k] int32, the drafter's tokens; -1: there is no child
  TensorView best_scores;    // as many rows, float32, their log-probabilities or logarithms of chances
  OptionalTensor token_ids;  // [Vd] int32, the target's tokens; None: the drafter's are the same
  LevelEntries entries;
  TensorView roots;  // [B, 1] int32; written to column 0 where first is 1
  TensorView known;  // [B] int32, 0: the request drafts nothing
  CandidateColumns candidates;
  BeamRows before;        // tokens, depths and above are not read
  BeamRows after;         // written
  OptionalTensor origin;  // [B * w] int64, the rows that `above` names for those of `before`; None: their numbers
  int64_t first, first_node;

  Device validate() const {
    Checker check;
    Dim B{"B"}, R{"rows"}, k{"k"};
    check(roots, "roots", {DType::kInt32}, {B, 1});
    check(best_tokens, "best_tokens", {DType::kInt32}, {R, k});
    check(best_scores, "best_scores", {DType::kFloat32}, {R, k});
    const int64_t rows = check_growth(check, *this, B, k);
    if (R != rows && R != B) fail("best_tokens: expected ", rows, " rows or ", B.value, ", got ", R.value);
    return check.device();
  }
};

void run_cpu(const GrowLevel&);
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const GrowLevel&);
#endif

}  // namespace specengine
