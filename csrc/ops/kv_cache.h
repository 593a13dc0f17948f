// Addressing of the paged key/value cache. Slot s of request b lies in page block_table[b, s / 64], row s % 64.
// A page keeps each head's rows together, so that attention walks one head with unit stride.
#pragma once
#include "base/check.h"

namespace specengine {

constexpr int64_t kPageSize = 64;
constexpr int64_t kMaxNodes = 256;

// One layer of the cache, with the batch it serves: rows [row_start[b], row_start[b + 1]) belong to request b. They
// are the nodes of its tree from number `first_node` on; earlier passes wrote keys and values of the nodes before.
struct KvCacheView {
  TensorView k;            // [P, K, 64, D] float32 | bfloat16 | float16
  TensorView v;            // [P, K, 64, D], dtype of k
  TensorView block_table;  // [B, max_pages] int32
  TensorView lengths;      // [B] int32, tokens in the prefix
  TensorView row_start;    // [B + 1] int32
  int64_t first_node = 0;  // nodes
  mutable int64_t K = -1, D = -1, B = -1;

  Device validate(Checker& check) const {
    Dim pages{"P"}, heads{"K"}, dim{"D"}, batch{"B"}, max_pages{"max_pages"};
    check(k, "k_cache", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {pages, heads, kPageSize, dim});
    check(v, "v_cache", {k.dtype}, {pages, heads, kPageSize, dim});
    check(block_table, "block_table", {DType::kInt32}, {batch, max_pages});
    check(lengths, "lengths", {DType::kInt32}, {batch});
    check(row_start, "row_start", {DType::kInt32}, {batch + 1});
    if (first_node < 0 || first_node >= kMaxNodes)
      fail("first_node: expected 0 to ", kMaxNodes - 1, " nodes, got ", first_node);
    K = heads, D = dim, B = batch;
    return check.device();
  }

  // Host-readable tensors only: every row belongs to a request and every slot it needs has a page.
  void validate_rows(int64_t rows) const {
    const int32_t* start = row_start.as<int32_t>();
    if (start[0] != 0 || start[B] != rows) {
      fail("row_start: expected to run from 0 to ", rows, ", got ", start[0], " to ", start[B]);
    }
    for (int64_t b = 0; b < B; ++b) {
      if (start[b + 1] < start[b]) fail("row_start: decreases at entry ", b + 1);
      const int64_t length = lengths.as<int32_t>()[b], slots = length + first_node + start[b + 1] - start[b];
      if (length < 0) fail("lengths: entry ", b, " is negative");
      const int64_t needed = (slots + kPageSize - 1) / kPageSize;
      if (needed > block_table.shape[1]) {
        fail("block_table: request ", b, " needs ", needed, " pages for ", slots, " slots, has ", block_table.shape[1]);
      }
      for (int64_t p = 0; p < needed; ++p) {
        const int32_t page = block_table.as<int32_t>()[b * block_table.shape[1] + p];
        if (page < 0 || page >= k.shape[0]) {
          fail("block_table: page ", page, " of request ", b, " is not in 0 to ", k.shape[0] - 1);
        }
      }
    }
  }

  // Element offset of slot `slot` of head `head` of request `b`.
  int64_t offset(int64_t b, int64_t slot, int64_t head) const {
    const int64_t page = block_table.as<int32_t>()[b * block_table.shape[1] + slot / kPageSize];
    return ((page * K + head) * kPageSize + slot % kPageSize) * D;
  }
};

// The request that owns each row: a row's task asks for it once.
inline int64_t sequence_of(const int32_t* row_start, int64_t row) {
  int64_t b = 0;
  while (row >= row_start[b + 1]) ++b;
  return b;
}

}  // namespace specengine
