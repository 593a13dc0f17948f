// Draws the children of nodes from the drafter's logits. The sampling parameters shape them as they shape the target's.
// The noise is a stream of its own: an acceptance test or a residual that shared it would bias the output.
//
// That noise depends on the root's position and the node, so a draw is independent of the tokens that an earlier cycle
// drafted, and perhaps refused, for the same position.
//
// Rule `match` emits the target's own draws for every draft, so with `as_match` children may be drawn with the noise of
// those draws. The more alike the two distributions are, the more often drafted and drawn tokens are equal.
//
// CUDA refuses nothing: a row whose request is negative or idle, whose node is not among the tree's first 256, or
// whose scores are no distribution gives no siblings.
#pragma once
#include "ops/verify_tree.h"

namespace specengine {

struct DrawSiblings {
  TensorView logits;     // [R, C] float32
  TensorView requests;   // [R] int32: the row's request
  TensorView nodes;      // [R] int32: the node within that request whose children are drawn
  OptionalTensor index;  // [V] int32; see DraftLogits
  SampledTrees trees;

  TensorView drawn;    // [R, K] int32, written: siblings in the order of drawing; -1: no token is left to draw
  TensorView scores;   // [R, V] float32, workspace; CUDA: all zero before and after
  TensorView counts;   // [R, V] int32, workspace: all zero before and after
  TensorView weights;  // [R, V] int64, workspace

  bool replacement;  // whether a sibling may be drawn again
  bool as_match;     // whether to draw with the noise of rule `match`; then no sibling is drawn again

  Device validate() const {
    Checker check;
    Dim R{"R"}, C{"C"}, V{"V"}, M{"M"}, B{"B"}, K{"K"};
    check(logits, "logits", {DType::kFloat32}, {R, C});
    check(requests, "requests", {DType::kInt32}, {R});
    check(nodes, "nodes", {DType::kInt32}, {R});
    check(scores, "scores", {DType::kFloat32}, {R, V});
    check(counts, "counts", {DType::kInt32}, {R, V});
    check(weights, "weights", {DType::kInt64}, {R, V});
    check.optional(index, "index", {DType::kInt32}, {V});
    if (!index.defined() && C != V) fail("logits: expected V=", V.value, " columns without an index, got ", C.value);
    trees.validate(check, M, B);
    check(drawn, "drawn", {DType::kInt32}, {R, K});
    if (V < 1) fail("scores: expected at least one column");
    if (K < 1) fail("drawn: expected at least one column");
    if (as_match && replacement) fail("replacement: expected False, the noise of match would repeat one token");
    return check.device();
  }
};

SPECENGINE_CPU_OP(DrawSiblings)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const DrawSiblings& op);
#endif

}  // namespace specengine
