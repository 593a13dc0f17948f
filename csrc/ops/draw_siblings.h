// Draws the children of nodes from the drafter's logits, shaped by the sampling parameters as the target's are, with
// noise of a stream of its own: an acceptance test or a residual that shared it would bias the output.
//
// That noise depends on the root's position and the node, so that what an earlier cycle drafted for the same position,
// and perhaps refused, says nothing about what is drafted now.
//
// Rule `match` emits the target's own draws whatever is drafted, so nothing is biased by children drawn with the noise
// of these; the more alike the two distributions are, the more often they are the same tokens.
//
// CUDA refuses nothing: a row whose request is negative or idle, whose node is not among the tree's first 256, or
// whose scores are no distribution gives no siblings.
#pragma once
#include "ops/verify_tree.h"

namespace specengine {

struct DrawSiblings : SampledTrees {
  TensorView logits;    // [R, C] float32
  TensorView requests;  // [R] int32: whose row it is
  TensorView nodes;     // [R] int32: the node within that request whose children are drawn
  TensorView index;     // [V] int32 or None; see DraftLogits

  TensorView drawn;    // [R, K] int32, written: siblings in the order they were drawn; -1: nothing is left to draw
  TensorView scores;   // [R, V] float32, workspace; CUDA: all zero before and after
  TensorView counts;   // [R, V] int32, workspace: all zero before and after
  TensorView weights;  // [R, V] int64, workspace

  bool replacement;  // whether a sibling may be drawn again
  bool as_match;     // whether with the noise of rule `match`; no sibling is drawn again then

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
    SampledTrees::validate(check, M, B);
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
