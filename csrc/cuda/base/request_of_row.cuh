// Which request a row of a pass belongs to.
#pragma once
#include "cuda/base/reduce.cuh"

namespace specengine {

// The request of a row, `batch` if it has none: the lanes of a warp count the requests that end before it.
__device__ inline int request_of_row(const int* row_start, int batch, int row) {
  int before = 0;
  for (int b = threadIdx.x % kWarp; b < batch; b += kWarp) before += row_start[b + 1] <= row;
  return warp_reduce<Sum>(before);
}

}  // namespace specengine
