// Planted bugs in accesses to memory: overruns, wild and misaligned addresses, reads of what was never written.
#include <cstring>

#include "cuda/base/arch.cuh"
#include "sim/planted.h"

namespace specengine {
namespace {

constexpr int kThreads = sim::kPlantedThreads;

__global__ void uninitialised_read(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, rows, kThreads);
  const int t = threadIdx.x;
  if (!broken || t != 40) rows[t] = in[t];
  __syncthreads();
  out[t] = rows[t];
}

__global__ void shared_overrun(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, rows, kThreads);
  SPECENGINE_SHARED(float, next, kThreads);
  float* const to = rows;
  const int t = threadIdx.x;
  next[t] = 0;
  to[t] = in[t];
  if (broken && t == 63) to[t + 1] = 1;
  __syncthreads();
  out[t] = rows[t] + next[t];
}

__global__ void dynamic_shared_overrun(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_DYNAMIC_SHARED(float, rows);
  const int t = threadIdx.x;
  rows[t + (broken ? 1 : 0)] = in[t];
  __syncthreads();
  out[t] = broken ? 0 : rows[t];
}

__global__ void global_overrun(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t];
  if (broken && t == 63) out[t + 1] = 0;
}

__global__ void global_read_overrun(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t];
  if (broken && t == 0) out[t] = in[-1];
}

__global__ void copy_overrun(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  if (threadIdx.x == 0) memcpy(out, in, sizeof(float) * (kThreads + (broken ? 1 : 0)));
}

__global__ void wild_address(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t + (broken ? int64_t{1} << 40 : 0)];
}

__global__ void array_overrun(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  float own[4] = {1, 2, 3, 4};
  own[t % 4] = in[t];
  out[t] = own[t % 4 + (broken ? 4 : 0)];
}

__global__ void misaligned_vector(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  if (t >= 16) return;
  const float4 v = *reinterpret_cast<const float4*>(in + 4 * t + (broken ? 1 : 0));
  out[4 * t] = v.x, out[4 * t + 1] = v.y, out[4 * t + 2] = v.z, out[4 * t + 3] = v.w;
}

template <typename Array>
__device__ void through_shared(Array& rows, const float* in, float* out) {
  const int t = threadIdx.x;
  rows[t] = in[t];
  __syncthreads();
  if (t >= 16) return;
  *reinterpret_cast<float4*>(out + 4 * t) = *reinterpret_cast<const float4*>(&rows[4 * t]);
}

__global__ void misaligned_shared_vector(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, any, kThreads);
  SPECENGINE_SHARED(alignas(16) float, aligned, kThreads);
  broken ? through_shared(any, in, out) : through_shared(aligned, in, out);
}

__global__ void constant_load_of_own_output(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t];
  __syncthreads();
  if (t == 0) out[0] = __uint_as_float(load_streaming(broken ? out : in).x);
}

__global__ void prefetch_overrun(const float* in, float* out, bool broken) {
  prefetch_to_l2(in + (broken && threadIdx.x == 63 ? 64 : threadIdx.x));
  wait_for_previous_kernel();
  out[threadIdx.x] = in[threadIdx.x];
}

// Not local to a function: the guard of such a variable is an atomic that the hooks do not have.
const sim::PlantedKernels kKernels = {
    SPECENGINE_PLANTED(uninitialised_read),
    SPECENGINE_PLANTED(shared_overrun),
    SPECENGINE_PLANTED(dynamic_shared_overrun),
    SPECENGINE_PLANTED(global_overrun),
    SPECENGINE_PLANTED(global_read_overrun),
    SPECENGINE_PLANTED(copy_overrun),
    SPECENGINE_PLANTED(prefetch_overrun),
    SPECENGINE_PLANTED(wild_address),
    SPECENGINE_PLANTED(array_overrun),
    SPECENGINE_PLANTED(misaligned_vector),
    SPECENGINE_PLANTED(misaligned_shared_vector),
    SPECENGINE_PLANTED(constant_load_of_own_output),
};

}  // namespace

const sim::PlantedKernels& sim::planted_memory_kernels() { return kKernels; }

}  // namespace specengine
