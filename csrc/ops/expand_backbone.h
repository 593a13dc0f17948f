// Builds the comb-shaped tree of FastEagle ("backbone expansion") and CAPE from the logits of all levels at once.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"

namespace specengine {

// Level t proposes its `width` most likely tokens as children of the backbone node of level t - 1 (level 0: of the
// root); the most likely one is the next backbone node, its siblings are leaves. width = widths[number of thresholds
// below the level's highest probability]: no thresholds is FastEagle's constant k, CAPE has 0.3/0.6/0.8 and 8/6/4/2.
struct ExpandBackbone {
  TensorView logits;       // [B, T, V] float32
  TensorView root;         // [B] int32, last committed token
  TensorView thresholds;   // [C] float32, ascending
  TensorView widths;       // [C + 1] int32
  TensorView tokens;       // [B, N] int32, written; N >= 1 + T * max(widths)
  TensorView parents;      // [B, N] int32, written; -1 for the root
  TensorView depths;       // [B, N] int32, written
  TensorView scores;       // [B, N] float32, written: cumulative log-probability, root 0
  TensorView ancestors;    // [B, N, W] int32 bits, written; W = ceil(N / 32)
  TensorView node_counts;  // [B] int32, written; entries past it are -1 (tokens, parents) and 0 (the rest)
  TensorView top_tokens;   // [B, T, max(widths)] int32, workspace
  TensorView top_scores;   // [B, T, max(widths)] float32, workspace

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, V{"V"}, C{"C"}, N{"N"}, k{"k"};
    check(logits, "logits", {DType::kFloat32}, {B, T, V});
    check(root, "root", {DType::kInt32}, {B});
    check(thresholds, "thresholds", {DType::kFloat32}, {C});
    check(widths, "widths", {DType::kInt32}, {C + 1});
    check(tokens, "tokens", {DType::kInt32}, {B, N});
    check(parents, "parents", {DType::kInt32}, {B, N});
    check(depths, "depths", {DType::kInt32}, {B, N});
    check(scores, "scores", {DType::kFloat32}, {B, N});
    check(ancestors, "ancestors", {DType::kInt32}, {B, N, (N + 31) / 32});
    check(node_counts, "node_counts", {DType::kInt32}, {B});
    check(top_tokens, "top_tokens", {DType::kInt32}, {B, T, k});
    check(top_scores, "top_scores", {DType::kFloat32}, {B, T, k});
    if (N > kMaxNodes) fail("tokens: N=", N.value, ", at most ", kMaxNodes, " nodes are supported");
    if (N < 1 + T * k) fail("tokens: N=", N.value, " cannot hold the root and ", T.value, " levels of ", k.value);
    if (k < 1 || k > V) fail("top_tokens: width ", k.value, ", expected 1 to V=", V.value);
    return check.device();
  }
};

SPECENGINE_CPU_OP(ExpandBackbone)

}  // namespace specengine
