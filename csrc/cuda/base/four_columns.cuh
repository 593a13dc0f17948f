// Rows walked four columns at a time.
#pragma once
#include <cstdint>

#include "base/tensor_view.h"
#include "cuda/base/arch.cuh"

namespace specengine {

// Whether all rows of `columns` elements start on a 16-byte boundary, so that four columns are one access.
inline bool rows_are_aligned(int64_t columns, std::initializer_list<const TensorView*> tensors) {
  if (columns % 4 != 0) return false;
  for (const TensorView* t : tensors) {
    if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return false;
  }
  return true;
}

// Four columns, those from `count` on as 0. Aligned rows have whole fours.
template <bool kAligned>
__device__ inline float4 load_four(const float* from, int count) {
  if constexpr (kAligned) return *reinterpret_cast<const float4*>(from);
  return {from[0], count > 1 ? from[1] : 0.0f, count > 2 ? from[2] : 0.0f, count > 3 ? from[3] : 0.0f};
}

template <bool kAligned, typename Out>
__device__ inline void store_four(Out* to, float4 x, int count) {
  if constexpr (!kAligned) {
    to[0] = from_float<Out>(x.x);
    if (count > 1) to[1] = from_float<Out>(x.y);
    if (count > 2) to[2] = from_float<Out>(x.z);
    if (count > 3) to[3] = from_float<Out>(x.w);
  } else if constexpr (sizeof(Out) == sizeof(float)) {
    *reinterpret_cast<float4*>(to) = x;
  } else {
    *reinterpret_cast<uint2*>(to) = {pack_two<Out>(x.x, x.y), pack_two<Out>(x.z, x.w)};
  }
}

}  // namespace specengine
