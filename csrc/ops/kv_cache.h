// Addressing of the paged key/value cache. Slot s of request b lies in page block_table[b, s / 64], row s % 64. A page
// keeps each head's rows together, so attention walks one head with unit stride.
#pragma once
#include "base/check.h"

namespace specengine {

constexpr int64_t kPageSize = 64;
constexpr int64_t kMaxNodes = 256;

// The cache, one layer or all, with the batch it serves: rows [row_start[b], row_start[b + 1]) belong to request b.
// They are the nodes of its tree from number `first_node` on; earlier passes wrote keys and values of the nodes before.
struct KvCacheView {
  static constexpr char kRecord[] = "KVCacheView";
  TensorView k_cache;      // [P, K, 64, D] or [layers, P, K, 64, D], float32 | bfloat16 | float16
  TensorView v_cache;      // shape and dtype of k_cache
  TensorView block_table;  // [B, max_pages] int32
  TensorView lengths;      // [B] int32, tokens in the prefix
  TensorView row_start;    // [B + 1] int32
  int64_t first_node = 0;

  int64_t pages() const { return k_cache.shape[k_cache.ndim - 4]; }
  int64_t heads() const { return k_cache.shape[k_cache.ndim - 3]; }
  int64_t dim() const { return k_cache.shape[k_cache.ndim - 1]; }
  int64_t requests() const { return lengths.shape[0]; }

  // Of one layer.
  Device validate(Checker& check) const {
    Dim P{"P"}, K{"K"}, D{"D"};
    check(k_cache, "k_cache", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {P, K, kPageSize, D});
    check(v_cache, "v_cache", {k_cache.dtype}, {P, K, kPageSize, D});
    validate_batch(check);
    return check.device();
  }

  // Of all layers.
  void validate(Checker& check, int64_t layers, int64_t heads, int64_t dim) const {
    Dim P{"P"};
    check(k_cache, "k_cache", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {layers, P, heads, kPageSize, dim});
    check(v_cache, "v_cache", {k_cache.dtype}, {layers, P, heads, kPageSize, dim});
    validate_batch(check);
  }

  void validate_batch(Checker& check) const {
    Dim B{"B"}, max_pages{"max_pages"};
    check(block_table, "block_table", {DType::kInt32}, {B, max_pages});
    check(lengths, "lengths", {DType::kInt32}, {B});
    check(row_start, "row_start", {DType::kInt32}, {B + 1});
    if (first_node < 0 || first_node >= kMaxNodes) {
      fail("first_node: expected 0 to ", kMaxNodes - 1, " nodes, got ", first_node);
    }
  }

  // One layer of all.
  KvCacheView layer(int64_t number) const {
    const auto of_layer = [number](const TensorView& all) {
      TensorView one = all;
      one.ndim = 4;
      for (int i = 0; i < 4; ++i) one.shape[i] = all.shape[i + 1], one.strides[i] = all.strides[i + 1];
      const int64_t bytes = all.dtype == DType::kFloat32 ? 4 : 2;
      one.data = all.as<uint8_t>() + number * one.numel() * bytes;
      return one;
    };
    return {of_layer(k_cache), of_layer(v_cache), block_table, lengths, row_start, first_node};
  }

  // Checks that every row belongs to a request and every slot has a page. Host-readable tensors only.
  void validate_rows(int64_t rows) const {
    const int32_t* start = row_start.as<int32_t>();
    if (start[0] != 0 || start[requests()] != rows) {
      fail("row_start: expected to run from 0 to ", rows, ", got ", start[0], " to ", start[requests()]);
    }
    for (int64_t b = 0; b < requests(); ++b) {
      if (start[b + 1] < start[b]) fail("row_start: decreases at entry ", b + 1);
      const int64_t length = lengths.as<int32_t>()[b], slots = length + first_node + start[b + 1] - start[b];
      if (length < 0) fail("lengths: entry ", b, " is negative");
      const int64_t needed = (slots + kPageSize - 1) / kPageSize;
      if (needed > block_table.shape[1]) {
        fail("block_table: request ", b, " needs ", needed, " pages for ", slots, " slots, has ", block_table.shape[1]);
      }
      for (int64_t p = 0; p < needed; ++p) {
        const int32_t page = block_table.as<int32_t>()[b * block_table.shape[1] + p];
        if (page < 0 || page >= pages()) {
          fail("block_table: page ", page, " of request ", b, " is not in 0 to ", pages() - 1);
        }
      }
    }
  }

  // Element offset of slot `slot` of head `head` of request `b`.
  int64_t offset(int64_t b, int64_t slot, int64_t head) const {
    const int64_t page = block_table.as<int32_t>()[b * block_table.shape[1] + slot / kPageSize];
    return ((page * heads() + head) * kPageSize + slot % kPageSize) * dim();
  }
};

// The request that owns a row; linear in the requests, so a task asks once per row.
inline int64_t request_of(const int32_t* row_start, int64_t row) {
  int64_t b = 0;
  while (row >= row_start[b + 1]) ++b;
  return b;
}

}  // namespace specengine
