// The candidates of a tree whose shape is known: each node is the child of some rank, of a distribution that its level
// alone decides: Medusa's trees, chains of PARD and DFlash.
#pragma once
#include "ops/growth/grow_level.h"

namespace specengine {

// Column 1 + n is node n: the token of rank ranks[n] of level depths[n] - 1, with the scores of its path added up from
// the root on. Column 0 is the root.
struct FillRanks {
  TensorView best_tokens;       // [rows, 1 + k] int32, see by_request; children in columns 1 to k, likeliest first
  TensorView best_scores;       // as many, float32, their log-probabilities
  OptionalTensor token_ids;     // [Vd] int32, the target's tokens; None: the drafter's are the same
  TensorView ranks;             // [N] int32, from 0
  TensorView parents;           // [N] int32, columns before the node's
  TensorView depths;            // [N] int32, from 1 to `levels`
  TensorView history;           // [B, T] int32, committed tokens, the root last
  TensorView history_length;    // [B] int32, root included
  CandidateColumns candidates;  // [B, 1 + N], written
  int64_t levels;               // rows of a request
  bool by_request;              // row b * levels + level is that of request b and a level; otherwise row level * B + b

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, M{"1 + N"}, N{"N"}, R{"rows"}, K{"1 + k"}, V{"Vd"};
    check(history, "history", {DType::kInt32}, {B, T});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(best_tokens, "best_tokens", {DType::kInt32}, {R, K});
    check(best_scores, "best_scores", {DType::kFloat32}, {R, K});
    check.optional(token_ids, "token_ids", {DType::kInt32}, {V});
    check(ranks, "ranks", {DType::kInt32}, {N});
    check(parents, "parents", {DType::kInt32}, {N});
    check(depths, "depths", {DType::kInt32}, {N});
    M.value = 1 + N, M.bound_by = "ranks";
    check(candidates.tokens, "candidates.tokens", {DType::kInt32}, {B, M});
    check(candidates.parents, "candidates.parents", {DType::kInt32}, {B, M});
    check(candidates.depths, "candidates.depths", {DType::kInt32}, {B, M});
    check(candidates.scores, "candidates.scores", {DType::kFloat32}, {B, M});
    if (levels < 1) fail("levels: expected 1 or more, got ", levels);
    if (R != B * levels) fail("best_tokens: expected ", B * levels, " rows, got ", R.value);
    if (K < 2) fail("best_tokens: expected 2 columns or more, got ", K.value);
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const FillRanks&);
#endif

}  // namespace specengine
