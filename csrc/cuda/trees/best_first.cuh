// Trees that grow from the likeliest node on, by one warp: its lanes share the entries that compete.
#pragma once
#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "growth/best_first.h"

namespace specengine {

// As OneThread.
struct OneWarp {
  template <typename Step>
  __device__ int once(BestFirst& tree, const Step& step) const {
    __syncwarp();
    int result = 0;
    if (threadIdx.x % kWarp == 0) result = step();
    __syncwarp();
    tree.count = __shfl_sync(kAllLanes, tree.count, 0);
    return __shfl_sync(kAllLanes, result, 0);
  }

  __device__ int best(const BestFirst& tree) const {
    int best = -1;
    double highest = 0;
    const auto meet = [&](int node) {
      const double value = tree.value(node);
      if (best < 0 || tree.is_better(node, value, best, highest)) best = node, highest = value;
    };
    for (int node = threadIdx.x % kWarp; node < tree.count; node += kWarp) {
      if (tree.competes(node)) meet(node);
    }
#pragma unroll 1
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const int other = __shfl_xor_sync(kAllLanes, best, offset);
      if (other >= 0) meet(other);
    }
    return best;
  }
};

}  // namespace specengine
