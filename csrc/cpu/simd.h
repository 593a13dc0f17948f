// Eight float lanes with the same arithmetic in every op of one instruction set. The build sets -ffp-contract=off, so a
// multiply-add is fused only where the source calls fmadd. Results then do not depend on how the compiler unrolls a
// loop, and a row's bits not on its neighbours.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/exp.h"
#include "cpu/float_types.h"

namespace specengine::SPECENGINE_ISA {

constexpr int kLanes = 8;
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

inline f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }

inline f32x8 load8(const float* p) {
  f32x8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline f32x8 load8(const bfloat16* p) {
#if defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
  u16x8 half;
  std::memcpy(&half, p, sizeof(half));
  const u32x8 wide = __builtin_convertvector(half, u32x8) << 16;
  f32x8 v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
#endif
}

inline void store8(float* p, f32x8 v) { std::memcpy(p, &v, sizeof(v)); }

inline f32x8 load8(const half* p) {
#if defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  f32x8 v;
  for (int i = 0; i < kLanes; ++i) v[i] = load1(p + i);
  return v;
#endif
}

inline f32x8 fmadd(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
inline float fmadd(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Sixteen lanes: one register of AVX-512, two elsewhere. Each lane has the same arithmetic as in eight.
#if defined(__AVX512F__)
typedef float f32x16 __attribute__((vector_size(64)));
inline f32x16 splat16(float x) { return _mm512_set1_ps(x); }
inline f32x16 load16(const float* p) { return _mm512_loadu_ps(p); }
// Masks of all lanes, because GCC 12 warns about an uninitialised operand inside the plain intrinsics.
inline f32x16 load16(const half* p) {
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline f32x16 load16(const bfloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xFFFF, bits);
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xFFFF, wide, 16));
}
inline void store16(float* p, f32x16 v) { _mm512_storeu_ps(p, v); }
inline f32x16 fmadd(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
inline f32x16 add16(f32x16 a, f32x16 b) { return a + b; }
#else
struct f32x16 {
  f32x8 low, high;
};
inline f32x16 splat16(float x) { return {splat(x), splat(x)}; }
inline f32x16 add16(f32x16 a, f32x16 b) { return {a.low + b.low, a.high + b.high}; }
template <typename T>
f32x16 load16(const T* p) {
  return {load8(p), load8(p + kLanes)};
}
inline void store16(float* p, f32x16 v) { store8(p, v.low), store8(p + kLanes, v.high); }
inline f32x16 fmadd(f32x16 a, f32x16 b, f32x16 c) {
  return {fmadd(a.low, b.low, c.low), fmadd(a.high, b.high, c.high)};
}
#endif

// The native register of the instruction set, for code that only asks for many lanes; a float is the vector of one
// lane, for what is left of a row.
#if defined(__AVX512F__)
typedef f32x16 Vector;
#else
typedef f32x8 Vector;
#endif
template <typename V>
constexpr int kLanesOf = sizeof(V) / sizeof(float);

template <typename V, typename T>
V load(const T* p) {
  if constexpr (kLanesOf<V> == 16) {
    return load16(p);
  } else if constexpr (kLanesOf<V> == 8) {
    return load8(p);
  } else {
    return load1(p);
  }
}
template <typename V>
void store(float* p, V v) {
  std::memcpy(p, &v, sizeof(v));
}
template <typename V>
V splat_of(float x) {
  if constexpr (kLanesOf<V> == 16) {
    return splat16(x);
  } else if constexpr (kLanesOf<V> == 8) {
    return splat(x);
  } else {
    return x;
  }
}

inline f32x8 max8(f32x8 a, f32x8 b) { return a > b ? a : b; }

// Fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
inline float sum8(f32x8 v) {
  f32x4 halves[2];
  std::memcpy(halves, &v, sizeof(v));
  const f32x4 four = halves[0] + halves[1];
  const f32x4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

// v[i][j] becomes v[j][i].
inline void transpose8(f32x8* v) {
  f32x8 twos[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    twos[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    twos[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = __builtin_shufflevector(twos[i + j], twos[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * j + 1] = __builtin_shufflevector(twos[i + j], twos[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    v[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

inline float max_of(f32x8 v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// The first index of the largest value; a NaN is never larger.
inline int64_t argmax(const float* x, int64_t size) {
  f32x8 best = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) best = max8(load8(x + i), best);
  float top = max_of(best);
  for (; i < size; ++i) top = x[i] > top ? x[i] : top;
  for (i = 0; i < size && x[i] != top; ++i) {
  }
  return i < size ? i : 0;
}

template <typename V>
struct LanesOf {
  using Float = V;
  using Int = decltype(V{} > V{});
  static V splat(float x) { return splat_of<V>(x); }
  static V fmadd(V a, V b, V c) { return SPECENGINE_ISA::fmadd(a, b, c); }
};
template <typename V>
V exp_of(V x) {
  return exp_polynomial<LanesOf<V>>(x);
}

inline f32x8 exp8(f32x8 x) { return exp_of(x); }

inline float exp1(float x) { return exp8(splat(x))[0]; }

}  // namespace specengine::SPECENGINE_ISA
