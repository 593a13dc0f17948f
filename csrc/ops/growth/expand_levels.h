// Grows whole trees from the distributions of all their levels, which are known at once: all nodes of a level have the
// same children.
#pragma once
#include "base/isa.h"
#include "ops/growth/level_shape.h"
#include "ops/growth/vocabulary_parts.h"

namespace specengine {

constexpr int64_t kMaxLevelChildren = 3840;  // of a request's levels together, of the CUDA kernels

// Column 0 is the root, the others are nodes in the order in which the shape adds them, so that the first N columns of
// a tree that grows from the likeliest node on are its tree of N nodes. A column without a node has token, parent and
// depth -1: past the last node, deeper than the request's limit, or of a token that the target lacks. The logits of a
// request that drafts nothing are not read. The CPU refuses logits with NaN or +infinity, or all -infinite, in any
// level of a request that drafts; on CUDA such a request has its root alone.
struct ExpandLevels {
  TensorView logits;  // [R, Vd] float32, a row per level and request, see by_request
  LevelShape shape;
  VocabularyParts parts;     // workspace; its k is the number of children of every node
  OptionalTensor token_ids;  // [Vd] int32, the target's tokens; None: the drafter's are the same
  OptionalTensor roots;      // [B, 1] int32; None: the last tokens of the history
  OptionalTensor history;    // [B, T] int32, committed tokens, as many as limits.history_length says
  TensorView known;          // [B] int32, 0: the request drafts nothing
  DepthLimits limits;
  CandidateColumns candidates;  // [B, 1 + N], written
  int64_t levels;               // rows of a request
  bool by_request;              // row b * levels + level is that of request b and a level; otherwise row level * B + b

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, R{"R"}, V{"Vd"}, k{"k"}, M{"1 + N"};
    check(logits, "logits", {DType::kFloat32}, {R, V});
    check.optional(token_ids, "token_ids", {DType::kInt32}, {V});
    check(known, "known", {DType::kInt32}, {B});
    if (!history.given() || roots.given()) check(roots, "roots", {DType::kInt32}, {B, 1});
    check.optional(history, "history", {DType::kInt32}, {B, T});
    check_parts(check, parts, R, V, k, B);
    limits.validate(check, B);
    check(candidates.tokens, "candidates.tokens", {DType::kInt32}, {B, M});
    check(candidates.parents, "candidates.parents", {DType::kInt32}, {B, M});
    check(candidates.depths, "candidates.depths", {DType::kInt32}, {B, M});
    check(candidates.scores, "candidates.scores", {DType::kFloat32}, {B, M});
    shape.validate(check, M);
    if (roots.given() && history.given()) fail("roots: expected them or a history, and not both");
    if (history.given() && (T < 1 || !limits.history_length.given())) {
      fail("history: expected columns and limits.history_length");
    }
    if (levels < 1) fail("levels: expected 1 or more, got ", levels);
    if (R != B * levels) fail("logits: expected ", B * levels, " rows, got ", R.value);
    if (M < 1 || M > kMaxNodes) fail("candidates.tokens: ", M.value, " columns, expected 1 to ", kMaxNodes);
    if (shape.shape() == ShapeKind::kBackbone && M < 1 + levels * k) {
      fail("candidates.tokens: ", M.value, " columns cannot hold the root and ", levels, " levels of ", k.value);
    }
    if (check.for_cuda() && levels * k > kMaxLevelChildren) {
      fail("parts.tokens: ", levels, " levels of ", k.value, " children, at most ", kMaxLevelChildren,
           " together are supported on cuda");
    }
    return check.device();
  }

  int64_t row_of(int64_t b, int64_t level) const {
    return by_request ? b * levels + level : level * known.shape[0] + b;
  }

  Roots where_roots_are() const {
    if (roots.given()) return {roots.as<int>(), nullptr, 1};
    return {history.as<int>(), limits.history_length.as<int>(), static_cast<int>(history.shape[1])};
  }
};

SPECENGINE_CPU_OP(ExpandLevels)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const ExpandLevels&);
#endif

}  // namespace specengine
