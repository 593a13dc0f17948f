// Cuts scored candidates to trees of N nodes inside captured cycles, where the device alone knows how deep they may be.
#pragma once
#include "ops/growth/grow_level.h"
#include "ops/select_nodes.h"

namespace specengine {

// Where SelectNodes writes.
struct SelectedTrees {
  static constexpr char kRecord[] = "SelectedTrees";
  TensorView tokens;       // [B, N] int32
  TensorView parents;      // [B, N] int32
  TensorView depths;       // [B, N] int32
  TensorView kept;         // [B, N] int32
  TensorView ancestors;    // [B, N, W] int32 bits
  TensorView node_counts;  // [B] int32
};

// As SelectNodes. The deepest depth of a request is `levels` where it is known and 0 where not, at most the tokens that
// it may still commit besides the bonus token; an idle request gets no nodes.
struct SelectLimited {
  CandidateColumns candidates;
  TensorView known;           // [B] int32
  TensorView history_length;  // [B] int32
  TensorView final_length;    // [B] int32, history length at which the request ends
  TensorView active;          // [B] int32, 0: idle
  SelectedTrees trees;        // written
  int64_t levels;

  // limits: of the requests.
  SelectNodes with_limits(const TensorView& limits) const {
    return {candidates.tokens, candidates.parents, candidates.depths, candidates.scores, limits,           trees.tokens,
            trees.parents,     trees.depths,       trees.kept,        trees.ancestors,   trees.node_counts};
  }

  Device validate() const {
    Checker check;
    Dim B{"B"};
    check(known, "known", {DType::kInt32}, {B});
    if (!check.for_cuda()) fail("known: expected a tensor on cuda");
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(final_length, "final_length", {DType::kInt32}, {B});
    check(active, "active", {DType::kInt32}, {B});
    if (levels < 0) fail("levels: expected 0 or more, got ", levels);
    return with_limits(known).validate();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const SelectLimited&);
#endif

}  // namespace specengine
