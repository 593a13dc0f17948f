// Work of several blocks that the last of them finishes.
#pragma once
#include "cuda/base/device.cuh"

namespace specengine {

// Whether this block is the last of `expected` to arrive; it then sees what they all wrote before they arrived. For
// whole blocks. counter: 0 before the first arrival, and again after the last one: the next launch, or a graph's next
// replay, needs nobody to clear it.
__device__ inline bool is_last_to_arrive(int* counter, int expected) {
  SPECENGINE_SHARED(bool, last, 1);
  __syncthreads();  // what the block wrote comes before its arrival
  if (threadIdx.x == 0) {
    const unsigned most = static_cast<unsigned>(expected) - 1;
    __threadfence();
    last[0] = atomicInc(reinterpret_cast<unsigned*>(counter), most) == most;
    __threadfence();
  }
  __syncthreads();
  return last[0];
}

}  // namespace specengine
