// The tokens that a drafter with a cache of its own has not cached, between captured cycles, as rows of its next pass.
#pragma once
#include "base/check.h"
#include "ops/growth/chain_columns.h"
#include "ops/kv_cache.h"

namespace specengine {

// Each row as a request of its own, which attends to the target's keys.
struct SeenKeys {
  static constexpr char kRecord[] = "SeenKeys";
  TensorView lengths;      // [B * N] int32, the last key's slot; 0 where none is seen
  TensorView block_table;  // [B * N, P] int32
  TensorView ancestors;    // [B * N, 1] int32, 1; 0 of padding
  int64_t block;           // tokens of a block
};

// Lays out the tokens of every running request from position first[b] on, and counts all but the root as cached then.
// A request runs if it is active and has two tokens or more: a prompt of one token is in no cache yet.
//
// Behind a request's last token may lie mask tokens, for drafters that draft all levels in one pass.
//
// A row of the text sees the target's keys of the blocks before its own, in the first block those up to itself; the
// root sees all keys that are cached, which end before it.
struct TextRows {
  TensorView history;         // [B, T] int32, committed tokens, the root last
  TensorView history_length;  // [B] int32, root included
  TensorView active;          // [B] int32, 0: idle
  TensorView block_table;     // [B, P] int32, of the target's cache
  TensorView first;           // [B] int32, tokens whose rows are final; written
  ChainColumns rows;          // written
  SeenKeys seen;              // written
  TensorView last;    // [B, 1 + masks] int64, written: the rows of each request's last token and its mask tokens
  TensorView counts;  // [5, B] int32, written: 0 or 1, whether the request runs; `first` as it was; the root's
                      // position; the target's slot that drafted rows see last; the last committed token
  int64_t unread;     // tokens at the end that are not laid out
  int64_t masks, mask_token;  // behind the last token

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, P{"P"}, M{"B * N"}, W{"W"};
    if (masks < 0 || mask_token < 0)
      fail("masks: expected 0 or more, of a token from 0, got ", masks, ", ", mask_token);
    check(history, "history", {DType::kInt32}, {B, T});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(active, "active", {DType::kInt32}, {B});
    check(block_table, "block_table", {DType::kInt32}, {B, P});
    check(first, "first", {DType::kInt32}, {B});
    rows.validate(check, M, W);
    check(seen.lengths, "seen.lengths", {DType::kInt32}, {M});
    check(seen.block_table, "seen.block_table", {DType::kInt32}, {M, P});
    check(seen.ancestors, "seen.ancestors", {DType::kInt32}, {M, 1});
    check(last, "last", {DType::kInt64}, {B, 1 + masks});
    check(counts, "counts", {DType::kInt32}, {5, B});
    if (B < 1 || M % B != 0 || M < B) fail("rows.tokens: ", M.value, " rows are no whole number for B=", B.value);
    if (M / B > kMaxNodes) fail("rows.tokens: ", M / B, " rows per request, at most ", kMaxNodes, " are supported");
    if (W * 32 < M / B) fail("rows.ancestors: ", W.value, " words cannot hold ", M / B, " rows");
    if (unread < 0) fail("unread: expected 0 or more tokens, got ", unread);
    if (seen.block < 1) fail("seen.block: expected 1 or more tokens, got ", seen.block);
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const TextRows&);
#endif

}  // namespace specengine
