// Rotary positions and the cache write of one head. A lane owns every 32nd pair of its components, in registers. The
// first R/2 pairs are rotated. Where one norm covers all heads of a row, every warp adds up all of them.
#pragma once
#include <type_traits>

#include "cuda/base/device.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/base/request_of_row.cuh"
#include "ops/layer.h"

namespace specengine {

constexpr int kPairs = kMaxHeadDim / 2 / kWarp;

struct Rope {
  const float *qkv, *cos, *sin, *q_norm, *k_norm;
  int64_t columns;  // of qkv
  const int *depths, *block_table, *lengths, *row_start;
  float* q;
  int heads, kv_heads, dim, batch, max_pages, first_node;
  int rotated;  // pairs
  int gates;    // heads that each follow a query head; 0: none
  float eps;
  bool whole_q, whole_k;  // a norm covers all heads of a row
};

// The components of a pair: (i, i + R/2) of the rotated ones, then halves of the rest. One norm sums them in this
// order.
struct Pair {
  int a, b;
};
__device__ inline Pair pair_of(const Rope& op, int i) {
  return i < op.rotated ? Pair{i, i + op.rotated} : Pair{i + op.rotated, i + op.dim / 2};
}

// The sum of squares of `columns` numbers; lanes own every 32nd.
__device__ inline float sum_of_squares(const float* x, int columns) {
  float sum = 0;
#pragma unroll 4
  for (int c = threadIdx.x % kWarp; c < columns; c += kWarp) sum = fmaf(x[c], x[c], sum);
  return warp_reduce<Sum>(sum);
}

// Called by a whole warp.  head: a query's, then a key's, then a value's.
template <typename Cache>
__device__ inline void rope_head(const Rope& op, Cache* k, Cache* v, int row, int head) {
  const int lane = threadIdx.x % kWarp;
  const bool is_query = head < op.heads, is_value = head >= op.heads + op.kv_heads;
  const int half = op.dim / 2;
  const int place = is_query && op.gates != 0 ? 2 * head : op.gates + head;
  const float* const queries = op.qkv + row * op.columns;
  const float* const from = queries + place * op.dim;
  float a[kPairs], b[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + j * kWarp;
    const Pair at = pair_of(op, i);
    a[j] = i < half ? from[at.a] : 0.0f, b[j] = i < half ? from[at.b] : 0.0f;
  }
  const int depth = op.depths[row], request = request_of_row(op.row_start, op.batch, row);
  const bool padding = depth < 0 || request == op.batch;
  if (padding && !is_query) return;

  const float* norm = is_query ? op.q_norm : is_value ? nullptr : op.k_norm;
  if (norm != nullptr) {
    float sum = 0;
    int columns = op.dim;
    if (is_query ? op.whole_q : op.whole_k) {
      const int first = is_query ? 0 : op.heads;
      norm += (head - first) * op.dim;
      columns *= is_query ? op.heads : op.kv_heads;
      sum = sum_of_squares(queries + (is_query ? 0 : op.gates + op.heads) * op.dim, columns);
    } else {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
      sum = warp_reduce<Sum>(sum);
    }
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(columns) + op.eps);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + j * kWarp;
      const Pair at = pair_of(op, i);
      if (i < half) a[j] *= scale * norm[at.a], b[j] *= scale * norm[at.b];
    }
  }
  const int length = padding ? 0 : op.lengths[request];
  int64_t page = 0;
  const int slot = is_query ? 0 : length + op.first_node + row - op.row_start[request];
  if (!is_query) page = op.block_table[static_cast<int64_t>(request) * op.max_pages + slot / kPageSize];
  if (!padding && !is_value) {
    const int64_t table = static_cast<int64_t>(length + depth) * op.rotated;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + j * kWarp;
      if (i >= op.rotated) break;
      const float c = op.cos[table + i], s = op.sin[table + i], x = a[j];
      a[j] = x * c - b[j] * s, b[j] = b[j] * c + x * s;
    }
  }

  const auto store = [&](auto* to) {
    using To = std::remove_pointer_t<decltype(to)>;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + j * kWarp;
      const Pair at = pair_of(op, i);
      if (i < half) to[at.a] = from_float<To>(a[j]), to[at.b] = from_float<To>(b[j]);
    }
  };
  if (is_query) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) a[j] = padding ? 0.0f : a[j], b[j] = padding ? 0.0f : b[j];
    return store(op.q + (static_cast<int64_t>(row) * op.heads + head) * op.dim);
  }
  const int kv_head = (head - op.heads) % op.kv_heads;
  store((is_value ? v : k) + ((page * op.kv_heads + kv_head) * kPageSize + slot % kPageSize) * op.dim);
}

inline Rope rope_of(const RopeCache& op) {
  const int heads = static_cast<int>(op.q.shape[1]), kv_heads = static_cast<int>(op.cache.heads());
  const auto is_whole = [&](const OptionalTensor& norm) { return norm.defined() && norm.shape[0] > op.cache.dim(); };
  return {op.qkv.as<float>() + op.first,
          op.cos.as<float>(),
          op.sin.as<float>(),
          op.q_norm.as<float>(),
          op.k_norm.as<float>(),
          op.qkv.shape[1],
          op.depths.as<int>(),
          op.cache.block_table.as<int>(),
          op.cache.lengths.as<int>(),
          op.cache.row_start.as<int>(),
          op.q.as<float>(),
          heads,
          kv_heads,
          static_cast<int>(op.cache.dim()),
          static_cast<int>(op.cache.requests()),
          static_cast<int>(op.cache.block_table.shape[1]),
          static_cast<int>(op.cache.first_node),
          static_cast<int>(op.cos.shape[1]),
          op.gated() ? heads : 0,
          op.eps,
          is_whole(op.q_norm),
          is_whole(op.k_norm)};
}

}  // namespace specengine
