// The arithmetic of attention over one block of 64 keys and values, shared by a few pairs of a row and a query head. A
// pair's result does not depend on the other pairs: every sum is one chain of fused multiply-adds in a fixed order.
// `static`, because GCC inlines functions that no other file can call: as comdat functions they cost a single row a
// tenth more.
#pragma once
#include <algorithm>
#include <type_traits>

#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {

constexpr int kBlockSize = 64;
constexpr int kRunPairs = 6;              // share their operands in registers: 6 x 2 sums, as in the linear layers
constexpr int kScores = kBlockSize + 16;  // a row of scores: room for whole vectors behind its end

template <typename Body>
static void with_count(int count, const Body& body) {
  static_assert(kRunPairs == 6);
  switch (count) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 5:
      return body(std::integral_constant<int, 5>());
    case 6:
      return body(std::integral_constant<int, 6>());
    default:
      __builtin_unreachable();
  }
}

// How many vectors of each of `pairs` pairs are summed side by side: at least eight sums hide the latency of one.
constexpr int vectors_of(int pairs) { return pairs == 1 ? 8 : pairs <= 3 ? 4 : 2; }

// out: [dim][64] of keys [count, dim]. No slot past `count` is read: it may never have been written.
template <typename Cache>
static void transpose(const Cache* keys, int count, int64_t dim, float* out) {
  for (int first = 0; first < count; first += kLanes) {
    const Cache* key[kLanes];
    for (int i = 0; i < kLanes; ++i) key[i] = keys + std::min(first + i, count - 1) * dim;
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      f32x8 square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load8(key[i] + d);
      transpose8(square);
      for (int i = 0; i < kLanes; ++i) store8(out + (d + i) * kBlockSize + first, square[i]);
    }
    for (; d < dim; ++d) {
      for (int i = 0; i < kLanes; ++i) out[d * kBlockSize + first + i] = load1(key[i] + d);
    }
  }
}

// keys: [dim][64].  scores: rows of `stride`, written in whole vectors, past `count` too. A score is one chain of fused
// multiply-adds in the order of the dimensions.
template <int kPairs>
static void score_block(const float* const* q, const float* keys, int count, int64_t dim, float scale, float* scores,
                        int64_t stride) {
  constexpr int kWidth = kLanesOf<Vector>, kVectors = std::min(vectors_of(kPairs), kBlockSize / kWidth);
  for (int first = 0; first < count; first += kVectors * kWidth) {
    Vector sum[kPairs][kVectors] = {};
    for (int64_t d = 0; d < dim; ++d) {
      Vector key[kVectors];
      for (int v = 0; v < kVectors; ++v) key[v] = load<Vector>(keys + d * kBlockSize + first + v * kWidth);
      for (int r = 0; r < kPairs; ++r) {
        const Vector x = splat_of<Vector>(q[r][d]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = fmadd(x, key[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kPairs; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        store(scores + r * stride + first + v * kWidth, sum[r][v] * splat_of<Vector>(scale));
      }
    }
  }
}

// out[r][D] = out[r] * rescale[r] + sum over i in [begin, end) of weights[r][i] * values[i], in order: from column d
// on, kVectors of V at a time; returns the first column left.
template <typename V, int kPairs, int kVectors, typename Cache>
static int64_t accumulate_columns(int64_t d, float* const* out, const float* rescale, const float* weights,
                                  const Cache* const* values, int begin, int end, int64_t dim) {
  constexpr int kWidth = kLanesOf<V>;
  for (; d + kVectors * kWidth <= dim; d += kVectors * kWidth) {
    V sum[kPairs][kVectors];
    for (int r = 0; r < kPairs; ++r) {
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load<V>(out[r] + d + v * kWidth) * splat_of<V>(rescale[r]);
    }
    for (int i = begin; i < end; ++i) {
      V value[kVectors];
      for (int v = 0; v < kVectors; ++v) value[v] = load<V>(values[i] + d + v * kWidth);
      for (int r = 0; r < kPairs; ++r) {
        const V weight = splat_of<V>(weights[r * kScores + i]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = fmadd(weight, value[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kPairs; ++r) {
      for (int v = 0; v < kVectors; ++v) store(out[r] + d + v * kWidth, sum[r][v]);
    }
  }
  return d;
}

template <int kPairs, typename Cache>
static void accumulate(float* const* out, const float* rescale, const float* weights, const Cache* const* values,
                       int begin, int end, int64_t dim) {
  constexpr int kMost = vectors_of(kPairs);
  const auto columns = [&]<typename V, int kVectors>(int64_t d) {
    return accumulate_columns<V, kPairs, kVectors>(d, out, rescale, weights, values, begin, end, dim);
  };
  int64_t d = columns.template operator()<Vector, kMost>(0);
  if constexpr (kMost > 4) d = columns.template operator()<Vector, 4>(d);
  if constexpr (kMost > 2) d = columns.template operator()<Vector, 2>(d);
  d = columns.template operator()<Vector, 1>(d);
  if constexpr (kLanesOf<Vector> > kLanes) d = columns.template operator()<f32x8, 1>(d);
  columns.template operator()<float, 1>(d);
}

}  // namespace specengine::SPECENGINE_ISA
