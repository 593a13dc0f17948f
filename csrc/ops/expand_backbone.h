// Builds the comb-shaped tree of FastEagle ("backbone expansion") and CAPE from the logits of all levels at once.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"

namespace specengine {

constexpr int kVocabularyPart = 8192;     // tokens that a block of the CUDA kernel reads
constexpr int kMaxVocabularyParts = 128;  // of the CUDA kernel

// Trees of B requests, N nodes each.
struct BackboneTrees {
  static constexpr char kRecord[] = "BackboneTrees";
  TensorView tokens;     // [B, N] int32; N >= 1 + T * max(widths)
  TensorView parents;    // [B, N] int32; -1 for the root
  TensorView depths;     // [B, N] int32
  TensorView scores;     // [B, N] float32: cumulative log-probability, root 0
  TensorView ancestors;  // [B, N, W] int32 bits; W = ceil(N / 32)
  // [B] int32; entries past it are padding: -1 (tokens, parents, depths) and 0 (scores, ancestors).
  // The CPU refuses logits with NaN or +infinity, or all -infinite. CUDA writes -1, and all but the root is padding.
  TensorView node_counts;

  void validate(Checker& check, Dim& B, Dim& N) const {
    check(tokens, "tokens", {DType::kInt32}, {B, N});
    check(parents, "parents", {DType::kInt32}, {B, N});
    check(depths, "depths", {DType::kInt32}, {B, N});
    check(scores, "scores", {DType::kFloat32}, {B, N});
    check(ancestors, "ancestors", {DType::kInt32}, {B, N, (N + 31) / 32});
    check(node_counts, "node_counts", {DType::kInt32}, {B});
  }
};

// Level t proposes its `width` most likely tokens as children of the backbone node of level t - 1 (level 0: of the
// root); the most likely one is the next backbone node, its siblings are leaves. width = widths[number of thresholds
// below the level's highest probability]: no thresholds is FastEagle's constant k, CAPE has 0.3/0.6/0.8 and 8/6/4/2.
// An idle request, whose root is -1, gets no nodes; its logits are not read.
struct ExpandBackbone {
  TensorView logits;      // [B, T, V] float32
  TensorView root;        // [B] int32, last committed token
  TensorView thresholds;  // [C] float32, ascending
  TensorView widths;      // [C + 1] int32
  BackboneTrees trees;    // written
  TensorView top_tokens;  // [B, T, S, max(widths)] int32, workspace; S = ceil(V / kVocabularyPart)
  TensorView top_scores;  // [B, T, S, max(widths)] float32, workspace
  TensorView sums;        // [B, T, S] float32, workspace
  TensorView arrived;     // [B] int32, workspace, 0 before and after
  // [V] int32, the tokens that trees have in place of those of the logits; None: the same
  OptionalTensor token_ids = {};

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, V{"V"}, C{"C"}, N{"N"}, k{"k"};
    check(logits, "logits", {DType::kFloat32}, {B, T, V});
    check(root, "root", {DType::kInt32}, {B});
    check(thresholds, "thresholds", {DType::kFloat32}, {C});
    check(widths, "widths", {DType::kInt32}, {C + 1});
    check.optional(token_ids, "token_ids", {DType::kInt32}, {V});
    trees.validate(check, B, N);
    const int64_t parts = (V + kVocabularyPart - 1) / kVocabularyPart;
    check(top_tokens, "top_tokens", {DType::kInt32}, {B, T, parts, k});
    check(top_scores, "top_scores", {DType::kFloat32}, {B, T, parts, k});
    check(sums, "sums", {DType::kFloat32}, {B, T, parts});
    check(arrived, "arrived", {DType::kInt32}, {B});
    if (N > kMaxNodes) fail("tokens: N=", N.value, ", at most ", kMaxNodes, " nodes are supported");
    if (N < 1 + T * k) fail("tokens: N=", N.value, " cannot hold the root and ", T.value, " levels of ", k.value);
    if (k < 1 || k > V) fail("top_tokens: width ", k.value, ", expected 1 to V=", V.value);
    if (check.for_cuda() && parts > kMaxVocabularyParts) {
      fail("logits: V=", V.value, ", at most ", kVocabularyPart * kMaxVocabularyParts, " are supported on cuda");
    }
    return check.device();
  }
};

SPECENGINE_CPU_OP(ExpandBackbone)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const ExpandBackbone&);
#endif

}  // namespace specengine
