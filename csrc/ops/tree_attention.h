// Attention of tree nodes over the paged cache: a node sees the whole prefix, its ancestors and itself.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"

namespace specengine {

struct TreeAttention {
  TensorView q;          // [M, H, D] float32
  KvCacheView cache;     // one layer; the nodes' own rows are already written (slot = prefix length + node index)
  TensorView ancestors;  // [M, W] int32, bit j of word w: node 32w + j is on the row's path (itself included);
                         // None: every sequence's rows are a chain (causal mask), of any length
  TensorView out;        // [M, H, D] float32, written
  float scale;
  int64_t window;  // a key is visible while query position - key position < window; 0: no window

  Device validate() const {
    Checker check;
    Dim M{"M"}, H{"H"}, W{"W"};
    const Device device = cache.validate(check);
    check(q, "q", {DType::kFloat32}, {M, H, cache.D});
    check(out, "out", {DType::kFloat32}, {M, H, cache.D});
    check.optional(ancestors, "ancestors", {DType::kInt32}, {M, W});
    if (cache.K < 1 || H < 1 || H % cache.K != 0) fail("q: H=", H.value, " heads are no multiple of K=", cache.K);
    if (H / cache.K > kMaxGroup) fail("q: at most ", kMaxGroup, " query heads per key/value head are supported");
    if (window < 0) fail("window: expected 0 (none) or a positive number of tokens, got ", window);
    return device;
  }

  static constexpr int64_t kMaxGroup = 256;
};

SPECENGINE_WIDE_CPU_OP(TreeAttention)

}  // namespace specengine
