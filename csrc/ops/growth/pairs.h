// The pairs of hidden state and token that a drafter has not read, between captured cycles: kept by one, read by the
// next.
#pragma once
#include "base/check.h"
#include "ops/growth/chain_columns.h"
#include "ops/kv_cache.h"

namespace specengine {

// Lays out waiting pairs as the rows of a pass: rows [b * N, (b + 1) * N) are a chain of request b's pairs and, where
// there is one, of masks, then padding (token -1, parent -1, depth -1, no ancestor bits). Pair i of a request has the
// token of position first + i + 1.
struct PairRows {
  TensorView history;         // [B, T] int32, committed tokens, the root last
  TensorView history_length;  // [B] int32, root included
  TensorView counts;          // [B] int32, pairs that wait; 0: the request is idle, or nothing is known of it
  TensorView first;           // [B] int32, number of the first one
  ChainColumns rows;          // written
  TensorView last;            // [B, 1 + masks] int64, written: the rows of each request's last pair, whether it is read
                              // or not, and of its masks
  TensorView ends;            // [3, B] int32, written: the number of each request's last pair, and of the next one; the
                              // last committed token
  OptionalTensor above;       // [B * N] int64, written: the hidden state of each row, out of N - masks of each request
                              // and, after them all, that of masks
  OptionalTensor blocks;      // [B, S] int32, whose first column becomes the last committed tokens
  int64_t unread;             // pairs at the end that are not laid out
  int64_t masks, mask_token;  // after the last pair

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, M{"B * N"}, W{"W"}, S{"S"};
    if (masks < 0 || mask_token < 0)
      fail("masks: expected 0 or more, of a token from 0, got ", masks, ", ", mask_token);
    check(history, "history", {DType::kInt32}, {B, T});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(counts, "counts", {DType::kInt32}, {B});
    check(first, "first", {DType::kInt32}, {B});
    rows.validate(check, M, W);
    check(last, "last", {DType::kInt64}, {B, 1 + masks});
    check(ends, "ends", {DType::kInt32}, {3, B});
    check.optional(above, "above", {DType::kInt64}, {M});
    check.optional(blocks, "blocks", {DType::kInt32}, {B, S});
    if (B < 1 || M % B != 0 || M < B)
      fail("rows.tokens: ", M.value, " rows are no whole number of pairs for B=", B.value);
    if (M / B > kMaxNodes) fail("rows.tokens: ", M / B, " pairs per request, at most ", kMaxNodes, " are supported");
    if (W * 32 < M / B) fail("rows.ancestors: ", W.value, " words cannot hold ", M / B, " pairs");
    if (M / B <= masks) fail("rows.tokens: ", M / B, " rows per request have no room for a pair and ", masks, " masks");
    if (blocks.given() && S < 1) fail("blocks: expected a column or more, got none");
    if (unread < 0) fail("unread: expected 0 or more pairs, got ", unread);
    return check.device();
  }
};

// Keeps the hidden states of the tokens that a cycle committed. Its tree was read by a draft that left no pair, or it
// has one node, and its pairs come behind those that wait.
struct KeepPairs {
  TensorView rows;            // [M, C] float32 | bfloat16 | float16, hidden states of all rows of the cycle
  TensorView row_start;       // [B + 1] int32
  TensorView path;            // [B, N] int32, accepted nodes from the root on
  TensorView path_length;     // [B] int32
  TensorView history_length;  // [B] int32, after the commit
  TensorView kept;            // [slots, R, C] float32 | bfloat16 | float16, written: those of the first B slots
  TensorView counts;          // [slots] int32, written
  TensorView first;           // [slots] int32, written unless pairs are added
  bool add;                   // whether pairs come behind others

  Device validate() const {
    Checker check;
    Dim B{"B"}, M{"M"}, N{"N"}, C{"C"}, R{"R"}, S{"slots"};
    check(rows, "rows", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, C});
    check(path, "path", {DType::kInt32}, {B, N});
    check(row_start, "row_start", {DType::kInt32}, {B + 1});
    check(path_length, "path_length", {DType::kInt32}, {B});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(kept, "kept", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {S, R, C});
    check(counts, "counts", {DType::kInt32}, {S});
    check(first, "first", {DType::kInt32}, {S});
    if (S < B) fail("kept: ", S.value, " slots cannot hold B=", B.value, " requests");
    return check.device();
  }
};

// Keeps the hidden state of the last node of every committed path.
struct KeepLast {
  TensorView rows;         // [M, C] float32 | bfloat16 | float16, hidden states of all rows of the cycle
  TensorView row_start;    // [B + 1] int32
  TensorView path;         // [B, N] int32, accepted nodes from the root on
  TensorView path_length;  // [B] int32
  TensorView kept;         // [slots, C] float32, written: those of the first B slots whose path is not empty
  TensorView known;        // [slots] int32, written: 1, or 0 where the path is empty

  Device validate() const {
    Checker check;
    Dim B{"B"}, M{"M"}, N{"N"}, C{"C"}, S{"slots"};
    check(rows, "rows", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, C});
    check(path, "path", {DType::kInt32}, {B, N});
    check(row_start, "row_start", {DType::kInt32}, {B + 1});
    check(path_length, "path_length", {DType::kInt32}, {B});
    check(kept, "kept", {DType::kFloat32}, {S, C});
    check(known, "known", {DType::kInt32}, {S});
    if (S < B) fail("kept: ", S.value, " slots cannot hold B=", B.value, " requests");
    return check.device();
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const PairRows&);
void run_cuda(const KeepPairs&);
void run_cuda(const KeepLast&);
#endif

}  // namespace specengine
