// The types floats are stored in, one value at a time, and the choice among them by dtype.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "base/tensor_view.h"

namespace specengine::SPECENGINE_ISA {

struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

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

inline void store1(half* p, float x) {  // round to nearest even; too large becomes infinite; NaN stays NaN
#if defined(__F16C__)
  p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t result;
  if (magnitude > 0x7F800000u) {
    result = 0x7E00;
  } else if (magnitude >= 0x477FF000u) {  // from 65520 on
    result = 0x7C00;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, a multiple of 2^-24
    float wide;
    std::memcpy(&wide, &magnitude, sizeof(wide));
    result = static_cast<uint32_t>(std::nearbyint(wide * 16777216.0f));
  } else {
    result = (magnitude - 0x38000000u + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  }
  p->bits = static_cast<uint16_t>(sign | result);
#endif
}

// Calls body with a value of the C++ type of a checked dtype: float32, bfloat16 or float16.
template <typename Body>
void with_float_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float{});
  if (dtype == DType::kBFloat16) return body(bfloat16{});
  body(half{});
}

}  // namespace specengine::SPECENGINE_ISA
