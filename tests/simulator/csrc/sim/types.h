// CUDA's built-in types, and its two 16-bit floats as bits with the conversions that kernels use.
#pragma once
#include <bit>
#include <cstdint>

struct uint2 {
  alignas(8) unsigned x;
  unsigned y;
};
struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  alignas(16) unsigned x;
  unsigned y, z, w;
};
struct int2 {
  alignas(8) int x;
  int y;
};
struct int4 {
  alignas(16) int x;
  int y, z, w;
};
struct float2 {
  alignas(8) float x;
  float y;
};
struct float4 {
  alignas(16) float x;
  float y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half2 {
  alignas(4) __half x;
  __half y;
};
struct __nv_bfloat162 {
  alignas(4) __nv_bfloat16 x;
  __nv_bfloat16 y;
};

inline float __half2float(__half h) {
  const uint32_t sign = (h.bits & 0x8000u) << 16, exponent = h.bits >> 10 & 31u, mantissa = h.bits & 0x3FFu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline __half __float2half_rn(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    return {0x7FFF};
  } else if (magnitude >= 0x477FF000u) {  // 65520 and more round to infinity
    half = 0x7C00;
  } else if (magnitude < 0x38800000u) {  // subnormal: one unit in the last place of 0.5 is theirs
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

inline float __bfloat162float(__nv_bfloat16 h) { return std::bit_cast<float>(static_cast<uint32_t>(h.bits) << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

inline __half __float2half(float x) { return __float2half_rn(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline uint16_t __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {__bfloat162float(h.x), __bfloat162float(h.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
