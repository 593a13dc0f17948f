// One token of the gated delta rule on sixteen columns of a head's state, [Dk, 16] floats. Columns do not meet, so a
// column's bits are those of a whole row of them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {

constexpr int64_t kColumns = 16;

// What a token's step reads; q is null where no output is needed.
struct DeltaToken {
  const float* k;
  const float* q;
  float decay, rate;
};

// Dot products add in four chains, which are as many as hide the latency of a multiply-add.
inline f32x16 total(const f32x16 (&sums)[4]) { return add16(add16(sums[0], sums[1]), add16(sums[2], sums[3])); }

// to = the state behind the token, of its parent's `from`; they may be the same. Returns the token's output.
inline f32x16 delta_step(const float* from, float* to, const DeltaToken& token, f32x16 v, int64_t dim) {
  const f32x16 decay = splat16(token.decay), zero = splat16(0.0f), minus = splat16(-1.0f);
  f32x16 sums[4] = {zero, zero, zero, zero};
  for (int64_t i = 0; i < dim; ++i) {
    const f32x16 faded = fmadd(load16(from + i * kColumns), decay, zero);
    sums[i % 4] = fmadd(faded, splat16(token.k[i]), sums[i % 4]);
  }
  const f32x16 delta = fmadd(fmadd(total(sums), minus, v), splat16(token.rate), zero);
  for (f32x16& sum : sums) sum = zero;
  for (int64_t i = 0; i < dim; ++i) {
    const f32x16 faded = fmadd(load16(from + i * kColumns), decay, zero);
    const f32x16 now = fmadd(splat16(token.k[i]), delta, faded);
    store16(to + i * kColumns, now);
    if (token.q) sums[i % 4] = fmadd(now, splat16(token.q[i]), sums[i % 4]);
  }
  return total(sums);
}

// Columns [first, first + 16) of a state [dim, columns]; those behind the last are 0.
inline void load_columns(const float* state, int64_t dim, int64_t columns, int64_t first, float* block) {
  const int64_t count = std::min(kColumns, columns - first);
  if (count < kColumns) std::fill_n(block, dim * kColumns, 0.0f);
  for (int64_t i = 0; i < dim; ++i) {
    std::memcpy(block + i * kColumns, state + i * columns + first, count * sizeof(float));
  }
}

inline void store_columns(const float* block, int64_t dim, int64_t columns, int64_t first, float* state) {
  const int64_t count = std::min(kColumns, columns - first);
  for (int64_t i = 0; i < dim; ++i) {
    std::memcpy(state + i * columns + first, block + i * kColumns, count * sizeof(float));
  }
}

// Sixteen values from `first` on of a vector; 0 behind its end.
inline f32x16 load_values(const float* values, int64_t columns, int64_t first) {
  if (columns - first >= kColumns) return load16(values + first);
  float padded[kColumns] = {};
  std::memcpy(padded, values + first, (columns - first) * sizeof(float));
  return load16(static_cast<const float*>(padded));
}

inline void store_values(f32x16 x, int64_t columns, int64_t first, float* values) {
  float all[kColumns];
  store16(all, x);
  std::memcpy(values + first, all, std::min(kColumns, columns - first) * sizeof(float));
}

}  // namespace specengine::SPECENGINE_ISA
