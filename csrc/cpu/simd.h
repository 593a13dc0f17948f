// Eight float lanes with the same arithmetic in every op of one instruction set. The build sets
// -ffp-contract=off, so a multiply-add is fused exactly where fmadd says so and nowhere else: results do not
// depend on how the compiler unrolled a loop, which is what keeps a row's bits independent of its neighbours.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/thread_pool.h"

namespace specengine::SPECENGINE_ISA {

constexpr int kLanes = 8;
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

inline f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }

inline f32x8 load8(const float* p) {
  f32x8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline f32x8 load8(const bfloat16* p) {
  u16x8 half;
  std::memcpy(&half, p, sizeof(half));
  const u32x8 wide = __builtin_convertvector(half, u32x8) << 16;
  f32x8 v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
}

inline void store8(float* p, f32x8 v) { std::memcpy(p, &v, sizeof(v)); }

inline float load1(const float* p) { return *p; }
inline float load1(const bfloat16* p) {
  const uint32_t wide = static_cast<uint32_t>(p->bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}
inline float load1(const half* p) {
  const uint32_t sign = (p->bits & 0x8000u) << 16, exponent = (p->bits >> 10) & 31, mantissa = p->bits & 0x3FF;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(mantissa), -24);
  const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | (mantissa << 13);
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline void store1(float* p, float x) { *p = x; }
inline void store1(bfloat16* p, float x) {  // round to nearest even, as torch does; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  p->bits = x != x ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
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

inline f32x8 max8(f32x8 a, f32x8 b) { return a > b ? a : b; }

// Fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
inline float sum8(f32x8 v) {
  f32x4 halves[2];
  std::memcpy(halves, &v, sizeof(v));
  const f32x4 four = halves[0] + halves[1];
  const f32x4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
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

// exp with a relative error below 2e-7; exactly 0 below -87.3 (so exp(-inf) = 0); infinity above 88.
inline f32x8 exp8(f32x8 x) {
  const f32x8 low = splat(-87.3f);
  const f32x8 clamped = x > splat(88.0f) ? splat(88.0f) : (x < low ? low : x);  // a NaN stays a NaN
  const f32x8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x8 shifted = fmadd(clamped, splat(1.44269504088896341f), magic);
  const f32x8 n = shifted - magic;
  f32x8 r = fmadd(n, splat(-0.693359375f), clamped);
  r = fmadd(n, splat(2.12194440e-4f), r);
  f32x8 p = splat(1.9875691500e-4f);
  p = fmadd(p, r, splat(1.3981999507e-3f));
  p = fmadd(p, r, splat(8.3334519073e-3f));
  p = fmadd(p, r, splat(4.1665795894e-2f));
  p = fmadd(p, r, splat(1.6666665459e-1f));
  p = fmadd(p, r, splat(5.0000001201e-1f));
  p = fmadd(p, r * r, r + splat(1.0f));
  i32x8 exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  exponent = (exponent << 23) + 0x3F800000;  // the low bits of `shifted` are n
  f32x8 power;
  std::memcpy(&power, &exponent, sizeof(power));
  return x < low ? splat(0.0f) : (x > splat(88.0f) ? splat(INFINITY) : p * power);
}

inline float exp1(float x) { return exp8(splat(x))[0]; }

// In this namespace, not in the pool's: an inline function compiled for AVX2 must never serve the portable build.
template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  run_parallel(
      count, [](void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace specengine::SPECENGINE_ISA
