// Prompt lookup on the device: each request's draft is a chain, the tokens that followed an earlier occurrence of its
// last tokens.
#pragma once
#include "base/check.h"
#include "ops/kv_cache.h"

namespace specengine {

// Checks how many of the last tokens must have occurred before, and how many are compared.
inline void check_ngrams(int64_t min_ngram, int64_t max_ngram) {
  constexpr int64_t kLongest = 64;
  if (min_ngram < 1 || max_ngram < min_ngram || max_ngram > kLongest) {
    fail("max_ngram: expected 1 <= min_ngram <= max_ngram <= ", kLongest, ", got ", min_ngram, " and ", max_ngram);
  }
}

// The tree of request b lies in rows [b * N, (b + 1) * N): the root, then the chain, then padding (token -1, parent
// -1, depth -1, no ancestor bits). The longest match wins (at least min_ngram tokens, compared up to max_ngram), of
// equals the newest. Behind the history's end the draft repeats itself, as a loop does. A chain is at most as long as
// the tokens that the request may still commit besides the bonus token. An idle request is all padding. N = 1 is plain
// decoding.
struct DraftLookup {
  TensorView history;         // [B, T] int32, committed tokens, the root last
  TensorView history_length;  // [B] int32, root included
  TensorView final_length;    // [B] int32, history length at which the request ends
  TensorView active;          // [B] int32, 0: idle
  TensorView tokens;          // [B * N] int32, written
  TensorView parents;         // [B * N] int32, written
  TensorView depths;          // [B * N] int32, written
  TensorView ancestors;       // [B * N, W] int32 bits, written
  int64_t min_ngram, max_ngram;

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, M{"B * N"}, W{"W"};
    check(history, "history", {DType::kInt32}, {B, T});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(final_length, "final_length", {DType::kInt32}, {B});
    check(active, "active", {DType::kInt32}, {B});
    check(tokens, "tokens", {DType::kInt32}, {M});
    check(parents, "parents", {DType::kInt32}, {M});
    check(depths, "depths", {DType::kInt32}, {M});
    check(ancestors, "ancestors", {DType::kInt32}, {M, W});
    if (B < 1 || M % B != 0 || M < B) fail("tokens: ", M.value, " rows are no whole number of nodes for B=", B.value);
    if (M / B > kMaxNodes) fail("tokens: ", M / B, " nodes per request, at most ", kMaxNodes, " are supported");
    if (W * 32 < M / B) fail("ancestors: ", W.value, " words cannot hold ", M / B, " nodes");
    check_ngrams(min_ngram, max_ngram);
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const DraftLookup&);
#endif

}  // namespace specengine
