// Sums of squares of a row, in an order that only its length decides.
#pragma once
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {

inline float sum_of_squares(const float* x, int64_t columns) {
  f32x8 sum = {};
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) sum = fmadd(load8(x + c), load8(x + c), sum);
  float total = sum8(sum);
  for (; c < columns; ++c) total = fmadd(x[c], x[c], total);
  return total;
}

inline float inverse_rms(const float* x, int64_t columns, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, columns) / static_cast<float>(columns) + eps);
}

}  // namespace specengine::SPECENGINE_ISA
