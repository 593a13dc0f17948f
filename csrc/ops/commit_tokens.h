// Acceptance on the device: appends each request's accepted tokens and bonus token to its history, cuts the run where
// the request ends inside it, makes its cached prefix as much longer, and writes a record for the host.
#pragma once
#include "base/check.h"
#include "ops/kv_cache.h"
#include "ops/verify_tree.h"

namespace specengine {

constexpr int kRecordHead = 4;  // numbers in front of the path

// A request ends with an end-of-text token (unless it ignores them) or at final_length; from then on it is idle. An
// idle request stays as it is and gets path_length 0. A root row without a distribution (bonus -1) ends the request
// without any of the run's tokens.
struct CommitTokens {
  TensorView tokens;          // [B * N] int32, of the trees
  TensorView parents;         // [B * N] int32
  AcceptedPaths accepted;     // path_length is written: cut to the tokens kept
  TensorView eos;             // [E] int32, end-of-text tokens
  TensorView ignores_eos;     // [B] int32
  TensorView final_length;    // [B] int32
  TensorView history;         // [B, T] int32, written
  TensorView history_length;  // [B] int32, advanced by the tokens kept
  TensorView cached;          // [B] int32, of the cache, advanced likewise
  TensorView active;          // [B] int32, written: 0 once a request ended
  TensorView record;          // [B, 4 + 3 N] int32, written: tokens kept, path length before the cut, bonus token,
                              // relaxed, then path, tokens and parents of the tree

  Device validate() const {
    Checker check;
    Dim B{"B"}, N{"N"}, M{"B * N"}, T{"T"}, E{"E"};
    accepted.validate(check, B, N);
    M.value = B * N, M.bound_by = "path";
    check(tokens, "tokens", {DType::kInt32}, {M});
    check(parents, "parents", {DType::kInt32}, {M});
    check(eos, "eos", {DType::kInt32}, {E});
    check(ignores_eos, "ignores_eos", {DType::kInt32}, {B});
    check(final_length, "final_length", {DType::kInt32}, {B});
    check(history, "history", {DType::kInt32}, {B, T});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(cached, "cached", {DType::kInt32}, {B});
    check(active, "active", {DType::kInt32}, {B});
    check(record, "record", {DType::kInt32}, {B, kRecordHead + 3 * N});
    if (N > kMaxNodes) fail("path: ", N.value, " columns, at most ", kMaxNodes, " nodes are supported");
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const CommitTokens&);
#endif

}  // namespace specengine
