// Planted bugs between two blocks: the parts of a sum lie in out[0] and out[1], the sum in out[2], the number of blocks
// that have arrived in out[3]: the tensor `arrived` of some.
#include "cuda/base/arch.cuh"
#include "cuda/base/last_block.cuh"
#include "sim/planted.h"

namespace specengine {
namespace {

constexpr int kThreads = sim::kPlantedThreads;

__device__ void leave_part(const float* in, float* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = in[blockIdx.x + 1];
}
__device__ bool arrive(float* out) {
  SPECENGINE_SHARED(bool, last, 1);
  if (threadIdx.x == 0) {
    last[0] = atomicAdd(&out[3], 1.0f) != 0;
    __threadfence();
  }
  __syncthreads();
  return last[0];
}
__device__ void finish(float* out) {
  if (threadIdx.x == 1) out[2] = out[0] + out[1], out[3] = 0;
}

__global__ void missing_fence(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  leave_part(in, out);
  if (!broken) __threadfence();
  if (arrive(out)) finish(out);
}

__global__ void missing_fence_behind(const float* in, float* out, bool broken) {
  SPECENGINE_SHARED(bool, last, 1);
  wait_for_previous_kernel();
  leave_part(in, out);
  __threadfence();
  if (threadIdx.x == 0) {
    last[0] = atomicAdd(&out[3], 1.0f) != 0;
    if (!broken) __threadfence();
  }
  __syncthreads();
  if (last[0]) finish(out);
}

__global__ void fence_of_another_thread(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  if (threadIdx.x == 40) out[blockIdx.x] = in[blockIdx.x + 1];
  if (!broken) __syncthreads();
  __threadfence();
  if (arrive(out)) finish(out);
}

__global__ void no_arrival(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  leave_part(in, out);
  __threadfence();
  if (broken) __syncthreads();
  if (broken || arrive(out)) finish(out);
}

__global__ void reads_ahead(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  if (broken && threadIdx.x == 7 && blockIdx.x == 0) out[5] = out[1];
  leave_part(in, out);
  __threadfence();
  if (arrive(out)) finish(out);
}

__global__ void blocks_overlap(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  if (blockIdx.x > 0 && !broken) return;
  out[threadIdx.x] = in[threadIdx.x] + blockIdx.x;
}

__global__ void reads_before_the_last_arrival(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  leave_part(in, out);
  __threadfence();
  const bool last = arrive(out);
  if (broken || last) finish(out);
}

__global__ void missing_reset(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  leave_part(in, out);
  __threadfence();
  if (!arrive(out)) return;
  if (threadIdx.x == 1) out[2] = out[0] + out[1];
  if (threadIdx.x == 1 && !broken) out[3] = 0;
}

__global__ void expects_too_many(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  leave_part(in, out);
  const bool last = is_last_to_arrive(reinterpret_cast<int*>(out + 3), broken ? 3 : 2);
  if (last && threadIdx.x == 1) out[2] = out[0] + out[1];
}

__global__ void endless_wait(const float*, float* out, bool broken) {
  wait_for_previous_kernel();
  const volatile float* const other = out;
  while (broken && *other == 0) {
  }
}

// Not local to a function: the guard of such a variable is an atomic that the hooks do not have.
const sim::PlantedKernels kKernels = {
    SPECENGINE_PLANTED(missing_fence), SPECENGINE_PLANTED(missing_fence_behind),
    SPECENGINE_PLANTED(no_arrival),    SPECENGINE_PLANTED(fence_of_another_thread),
    SPECENGINE_PLANTED(reads_ahead),   SPECENGINE_PLANTED(reads_before_the_last_arrival),
    SPECENGINE_PLANTED(missing_reset), SPECENGINE_PLANTED(expects_too_many),
    SPECENGINE_PLANTED(endless_wait),  SPECENGINE_PLANTED(blocks_overlap),
};

}  // namespace

const sim::PlantedKernels& sim::planted_block_kernels() { return kKernels; }
bool sim::counts_arrivals(const std::string& name) { return name == "missing_reset" || name == "expects_too_many"; }

}  // namespace specengine
