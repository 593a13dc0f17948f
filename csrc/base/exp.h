// The exp of every backend: a polynomial, so that CPU and CUDA give the same bits if multiply-adds are fused.
#pragma once
#include <cmath>

#include "base/host_device.h"

namespace specengine {

// exp with a relative error below 2e-7; exactly 0 below -87.3 (so exp(-inf) = 0); infinity above 88.
// Lanes: Float and Int, one number or a vector of them; splat; fmadd.
template <typename Lanes>
SPECENGINE_HOST_DEVICE inline typename Lanes::Float exp_polynomial(typename Lanes::Float x) {
  using V = typename Lanes::Float;
  const V low = Lanes::splat(-87.3f), high = Lanes::splat(88.0f);
  const V clamped = x > high ? high : (x < low ? low : x);  // a NaN stays a NaN
  const V magic = Lanes::splat(12582912.0f);                // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = Lanes::fmadd(clamped, Lanes::splat(1.44269504088896341f), magic);
  const V n = shifted - magic;
  V r = Lanes::fmadd(n, Lanes::splat(-0.693359375f), clamped);
  r = Lanes::fmadd(n, Lanes::splat(2.12194440e-4f), r);
  V p = Lanes::splat(1.9875691500e-4f);
  p = Lanes::fmadd(p, r, Lanes::splat(1.3981999507e-3f));
  p = Lanes::fmadd(p, r, Lanes::splat(8.3334519073e-3f));
  p = Lanes::fmadd(p, r, Lanes::splat(4.1665795894e-2f));
  p = Lanes::fmadd(p, r, Lanes::splat(1.6666665459e-1f));
  p = Lanes::fmadd(p, r, Lanes::splat(5.0000001201e-1f));
  p = Lanes::fmadd(p, r * r, r + Lanes::splat(1.0f));
  const auto exponent = (__builtin_bit_cast(typename Lanes::Int, shifted) << 23) + 0x3F800000;  // its low bits are n
  const V power = __builtin_bit_cast(V, exponent);
  return x < low ? Lanes::splat(0.0f) : (x > high ? Lanes::splat(INFINITY) : p * power);
}

}  // namespace specengine
