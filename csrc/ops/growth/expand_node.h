// Grows trees from the likeliest node on where the children of a node depend on the path to it: a node of each request
// in every step.
#pragma once
#include "base/isa.h"
#include "growth/path_growth.h"
#include "ops/growth/level_shape.h"
#include "ops/growth/vocabulary_parts.h"

namespace specengine {

// Trees between two steps; nothing needs to be set before the first one.
struct OpenedNodes {
  static constexpr char kRecord[] = "OpenedNodes";
  TensorView tokens;           // [B, N, k] int32, the target's, of each opened node's children, likeliest first
  TensorView log_probs;        // [B, N, k] float32, of these
  OptionalTensor confidences;  // [B, N] float32, of each opened node; None: there are none
  TensorView ranks;            // [B, N] int32, of each node among its siblings
  TensorView next;             // [B, N] int32, see BestFirst
  TensorView steps;            // [B, N] int32, the step that opened a node
  TensorView scores;           // [B, N] float64, log-probabilities added up
  TensorView counts;           // [B] int32, nodes
  TensorView opened;           // [B] int32, the node whose children the next step gets; -1: none
};

// Step 0 begins with the roots. A step takes the distribution of the children of the node that the one before has
// opened, and opens the next one; a request whose tree is complete has rows of padding from then on, and its logits are
// not read. Columns are as those of ExpandLevels. Nodes are ordered by log-probabilities; with a confidence the
// columns' scores are logarithms of chances, as ExpandLevel has them. On CUDA a row without a distribution has no
// children; the CPU refuses it.
struct ExpandNode {
  LevelLogits level;         // [B, Vd], of the opened nodes
  VocabularyParts parts;     // workspace
  OpenedNodes nodes;         // read and written
  OptionalTensor token_ids;  // [Vd] int32, the target's tokens; None: the drafter's are the same
  TensorView roots;          // [B, 1] int32
  TensorView known;          // [B] int32, 0: the request drafts nothing
  DepthLimits limits;
  CandidateColumns candidates;  // [B, N], written
  BeamRows after;    // written, w is 1: `beam` are columns, `above` the rows of the parents in [steps, B] rows
  LevelShape shape;  // one that grows from the likeliest node on
  int64_t levels, step;

  Device validate() const {
    Checker check;
    Dim B{"B"}, V{"Vd"}, k{"k"}, N{"N"}, W{"W"};
    check(level.logits, "logits", {DType::kFloat32}, {B, V});
    check.optional(level.delta, "delta", {DType::kFloat32}, {B, V});
    const bool confident = level.confidence.given() || nodes.confidences.given();
    if (confident) check(level.confidence, "confidence", {DType::kFloat32}, {B});
    check_parts(check, parts, B, V, k, B);
    check(nodes.tokens, "nodes.tokens", {DType::kInt32}, {B, N, k});
    check(nodes.log_probs, "nodes.log_probs", {DType::kFloat32}, {B, N, k});
    if (confident) check(nodes.confidences, "nodes.confidences", {DType::kFloat32}, {B, N});
    check(nodes.ranks, "nodes.ranks", {DType::kInt32}, {B, N});
    check(nodes.next, "nodes.next", {DType::kInt32}, {B, N});
    check(nodes.steps, "nodes.steps", {DType::kInt32}, {B, N});
    check(nodes.scores, "nodes.scores", {DType::kFloat64}, {B, N});
    check(nodes.counts, "nodes.counts", {DType::kInt32}, {B});
    check(nodes.opened, "nodes.opened", {DType::kInt32}, {B});
    check.optional(token_ids, "token_ids", {DType::kInt32}, {V});
    check(roots, "roots", {DType::kInt32}, {B, 1});
    check(known, "known", {DType::kInt32}, {B});
    limits.validate(check, B);
    check(candidates.tokens, "candidates.tokens", {DType::kInt32}, {B, N});
    check(candidates.parents, "candidates.parents", {DType::kInt32}, {B, N});
    check(candidates.depths, "candidates.depths", {DType::kInt32}, {B, N});
    check(candidates.scores, "candidates.scores", {DType::kFloat32}, {B, N});
    check(after.beam, "after.beam", {DType::kInt32}, {B, 1});
    check(after.tokens, "after.tokens", {DType::kInt32}, {B});
    check(after.depths, "after.depths", {DType::kInt32}, {B});
    check(after.ancestors, "after.ancestors", {DType::kInt32}, {B, W});
    check(after.above, "after.above", {DType::kInt64}, {B});
    if (N < 1 || N > kMaxNodes) fail("candidates.tokens: ", N.value, " columns, expected 1 to ", kMaxNodes);
    shape.validate(check, N);
    if (!shape.is_best_first()) fail("shape.kind: expected 2 to 4, got ", shape.kind);
    if (levels < 1) fail("levels: expected 1 or more, got ", levels);
    if (step < 0 || step + 1 >= 32 * W) {
      fail("step: nodes 0 to ", step + 1, " do not fit into ", W.value, " words of after.ancestors");
    }
    return check.device();
  }
};

// The tree of request b, as it is before a step.  count: of its nodes.
SPECENGINE_HOST_DEVICE inline PathGrowth of_request(PathGrowth all, int b, int count, int deepest, int64_t columns) {
  const int64_t from = b * columns;
  GrownNodes& nodes = all.tree.nodes;
  nodes = {nodes.parents + from, nodes.depths + from, nodes.ranks + from, nodes.scores + from};
  all.tree.next += from, all.tree.children.tokens += from * all.tree.children.count;
  all.tree.children.log_probs += from * all.tree.children.count;
  all.tree.count = count, all.tree.levels = deepest;
  all.opened += b, all.count += b, all.steps += from, all.tokens += from, all.scores += from;
  if (all.confidences != nullptr) all.confidences += from;
  all.row_column += b, all.row_token += b, all.row_depth += b, all.row_above += b;
  all.row_bits += static_cast<int64_t>(b) * all.words, all.request = b;
  return all;
}

// The trees of all requests, as if they were one.
inline PathGrowth growth_of(const ExpandNode& op) {
  const int columns = static_cast<int>(op.candidates.tokens.shape[1]), k = static_cast<int>(op.parts.tokens.shape[2]);
  const GrownNodes nodes{op.candidates.parents.as<int>(), op.candidates.depths.as<int>(), op.nodes.ranks.as<int>(),
                         op.nodes.scores.as<double>()};
  const ChildLists lists{op.nodes.tokens.as<int>(), op.nodes.log_probs.as<float>(), k, k};
  return {{nodes, op.nodes.next.as<int>(), lists, true, op.shape.best_first(), op.shape.beta, columns, 0, 0},
          op.nodes.opened.as<int>(),
          op.nodes.counts.as<int>(),
          op.nodes.steps.as<int>(),
          op.nodes.confidences.as<float>(),
          op.candidates.tokens.as<int>(),
          op.candidates.scores.as<float>(),
          op.after.beam.as<int>(),
          op.after.tokens.as<int>(),
          op.after.depths.as<int>(),
          op.after.ancestors.as<unsigned>(),
          op.after.above.as<int64_t>(),
          static_cast<int>(op.after.ancestors.shape[1]),
          0,
          static_cast<int>(op.known.shape[0])};
}

SPECENGINE_CPU_OP(ExpandNode)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const ExpandNode&);
#endif

}  // namespace specengine
