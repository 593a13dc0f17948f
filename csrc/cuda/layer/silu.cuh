// The gate of most MLPs.
#pragma once
#include "cuda/base/device.cuh"

namespace specengine {

struct Silu {
  __device__ float operator()(float gate, float up) const { return gate / (1.0f + expf(-gate)) * up; }
};

}  // namespace specengine
