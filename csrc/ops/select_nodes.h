// Cuts scored candidates to a tree of N nodes: the rerank of EAGLE-2 and -3, any tree of a drafter to a fixed width.
#pragma once
#include "base/check.h"
#include "base/draw_arithmetic.h"
#include "base/isa.h"
#include "ops/kv_cache.h"

namespace specengine {

constexpr int kMaxCandidates = 2048;

// Keeps the root and, of the candidates that are not too deep, the N - 1 with the highest scores, ties to the lower
// index, in the order of the candidates. Scores are cumulative log-probabilities (-infinity is the lowest one): a child
// does not score above its parent and comes after it, so that no node is kept without its parent.
struct SelectNodes {
  TensorView tokens;   // [B, M] int32
  TensorView parents;  // [B, M] int32, an earlier candidate; -1 for the root, which is candidate 0
  TensorView depths;   // [B, M] int32, of the root 0; -1: there is no candidate
  TensorView scores;   // [B, M] float32
  // [B] int32, deepest depth to keep; negative: the request is idle, gets no nodes, and its candidates are not read. A
  // request without candidate 0 gets no nodes either.
  TensorView limits;
  TensorView out_tokens;   // [B, N] int32, written
  TensorView out_parents;  // [B, N] int32, written: nodes; -1 for the root
  TensorView out_depths;   // [B, N] int32, written
  TensorView kept;         // [B, N] int32, written: each node's candidate
  TensorView ancestors;    // [B, N, W] int32 bits, written; W = ceil(N / 32)
  // [B] int32, written; entries past it are padding: -1, and 0 for ancestors. The CPU refuses candidates that are no
  // such tree. CUDA writes -1 and padding if a score is NaN, and else drops a candidate without a kept parent.
  TensorView node_counts;

  Device validate() const {
    Checker check;
    Dim B{"B"}, M{"M"}, N{"N"};
    check(tokens, "tokens", {DType::kInt32}, {B, M});
    check(parents, "parents", {DType::kInt32}, {B, M});
    check(depths, "depths", {DType::kInt32}, {B, M});
    check(scores, "scores", {DType::kFloat32}, {B, M});
    check(limits, "limits", {DType::kInt32}, {B});
    check(out_tokens, "out_tokens", {DType::kInt32}, {B, N});
    check(out_parents, "out_parents", {DType::kInt32}, {B, N});
    check(out_depths, "out_depths", {DType::kInt32}, {B, N});
    check(kept, "kept", {DType::kInt32}, {B, N});
    check(ancestors, "ancestors", {DType::kInt32}, {B, N, (N + 31) / 32});
    check(node_counts, "node_counts", {DType::kInt32}, {B});
    if (M < 1 || M > kMaxCandidates) fail("tokens: M=", M.value, " candidates, expected 1 to ", kMaxCandidates);
    if (N < 1 || N > kMaxNodes) fail("out_tokens: N=", N.value, " nodes, expected 1 to ", kMaxNodes);
    return check.device();
  }
};

// Orders candidates by preference: a larger score, then a lower index. No two keys are equal, and none is 0.
constexpr int kIndexBits = 11, kSelectionBits = 32 + kIndexBits;
static_assert(kMaxCandidates == 1 << kIndexBits);
SPECENGINE_HOST_DEVICE inline uint64_t selection_key(float score, int candidate) {
  return static_cast<uint64_t>(key_of(score)) << kIndexBits | static_cast<uint64_t>(kMaxCandidates - 1 - candidate);
}

SPECENGINE_CPU_OP(SelectNodes)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const SelectNodes&);
#endif

}  // namespace specengine
