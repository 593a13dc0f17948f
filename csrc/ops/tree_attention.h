// Attention of tree nodes over the paged cache.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"

namespace specengine {

// Checks the bits of every row. Host-readable tensors only; after validate_rows.
inline void check_ancestors(const KvCacheView& cache, const TensorView& ancestors) {
  const int32_t* row_start = cache.row_start.as<int32_t>();
  const int64_t words = ancestors.shape[1];
  for (int64_t b = 0; b < cache.requests(); ++b) {
    const int64_t nodes = cache.first_node + row_start[b + 1] - row_start[b];
    if (nodes > kMaxNodes)
      fail("row_start: request ", b, " has ", nodes, " nodes, at most ", kMaxNodes, " are supported");
    if (nodes > 32 * words) fail("ancestors: ", words, " words cannot hold the ", nodes, " nodes of request ", b);
    for (int64_t node = cache.first_node; node < nodes; ++node) {
      const int64_t row = row_start[b] + node - cache.first_node;
      const uint32_t* bits = ancestors.as<uint32_t>() + row * words;
      const bool sees_root = bits[0] & 1, sees_itself = bits[node / 32] >> (node % 32) & 1;
      bool sees_later = (static_cast<uint64_t>(bits[node / 32]) >> (node % 32)) > 1;
      for (int64_t w = node / 32 + 1; w < words; ++w) sees_later = sees_later || bits[w] != 0;
      if (!sees_root || !sees_itself || sees_later) {
        fail("ancestors: row ", row, " (node ", node, " of request ", b,
             ") must contain the root and itself, and no later node");
      }
    }
  }
}

// A node sees the whole prefix, its ancestors and itself. CUDA: or other nodes of its request, as its bits say; its
// position follows from how many these are. The CPU refuses bits of later nodes.
//
// CUDA: D is a multiple of 8, at most 256, and ancestors are needed (a chain longer than a tree is prefill). A row
// without any ancestor bit is padding and becomes zeros; its cache slot is never read. A float32 cache is always
// strict.
struct TreeAttention {
  TensorView q;              // [M, H, D] float32
  KvCacheView cache;         // one layer; the nodes' own rows are already written (slot = prefix length + node index)
  OptionalTensor ancestors;  // [M, W] int32, bit j of word w: node 32w + j is on the row's path (itself included);
                             // None: every request's rows are a chain (causal mask), of any length
  TensorView out;            // [M, H, D] float32, written; CUDA: or bfloat16 | float16
  float scale;
  int64_t window;             // a key is visible if query position - key position < window; 0: no window
  bool strict;                // a row's bits depend on its own path only, as always on the CPU
  OptionalTensor workspace;   // [n] float32, overwritten, n >= workspace_floats(); None if that is 0
  OptionalTensor sinks = {};  // [H] float32: a score of each head that takes part in the softmax and has no value
  // [n] int32, n >= M * H; None if the op needs no workspace. Zeros before the op and after it, so that ops in sequence
  // share it; ops at the same time need one each.
  OptionalTensor arrived = {};
  OptionalTensor upcoming = {};  // [bytes or numbers]: what is read next, a part of which CUDA brings to L2 meanwhile

  Device validate() const {
    Checker check;
    Dim M{"M"}, H{"H"}, W{"W"}, n{"n"}, counters{"counters"}, next{"next"};
    const Device device = cache.validate(check);
    check(q, "q", {DType::kFloat32}, {M, H, cache.dim()});
    check(out, "out", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, H, cache.dim()});
    check.optional(ancestors, "ancestors", {DType::kInt32}, {M, W});
    check.optional(workspace, "workspace", {DType::kFloat32}, {n});
    if (cache.heads() < 1 || H < 1 || H % cache.heads() != 0)
      fail("q: H=", H.value, " heads are no multiple of K=", cache.heads());
    if (H / cache.heads() > kMaxGroup) fail("q: at most ", kMaxGroup, " query heads per key/value head are supported");
    if (window < 0) fail("window: expected 0 (none) or a positive number of tokens, got ", window);
    check.optional(sinks, "sinks", {DType::kFloat32}, {H});
    check.optional(arrived, "arrived", {DType::kInt32}, {counters});
    check.optional(upcoming, "upcoming", {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kUInt8}, {next});
    return device;
  }

  static constexpr int64_t kMaxGroup = 256;
};

SPECENGINE_WIDE_CPU_OP(TreeAttention)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const TreeAttention&);
int64_t workspace_floats(const TreeAttention&);  // of shapes and dtypes alone; the tensors' contents are not read
#endif

}  // namespace specengine
