// Reductions over a warp and over a block, in one fixed order.
#pragma once
#include "cuda/base/device.cuh"

namespace specengine {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Sum {
  template <typename T>
  __device__ static T combine(T a, T b) {
    return a + b;
  }
};
struct Max {
  template <typename T>
  __device__ static T combine(T a, T b) {
    return a > b ? a : b;
  }
};
struct Min {
  template <typename T>
  __device__ static T combine(T a, T b) {
    return a < b ? a : b;
  }
};

// Every lane gets the result; a butterfly, so all lanes get the same bits.
template <typename Op, typename T>
__device__ inline T warp_reduce(T x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = Op::combine(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Every thread gets the result. scratch: shared, kWarp entries, free again after the call; blocks of whole warps only.
template <typename Op, typename T>
__device__ inline T block_reduce(T x, T* scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  x = warp_reduce<Op>(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  T total = scratch[0];
  for (int i = 1; i < warps; ++i) total = Op::combine(total, scratch[i]);
  __syncthreads();  // the caller may use scratch for the next one
  return total;
}

}  // namespace specengine
