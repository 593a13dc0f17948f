// Kernels that do something simple in a correct way or, with `broken`, with the one bug they are named after. A block
// of 64 threads: in [64] float, out [64] float.
#include <cstring>
#include <map>
#include <stdexcept>

#include "cuda/arch.cuh"
#include "sim/module.h"

namespace specengine {
namespace {

constexpr int kThreads = 64;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__global__ void missing_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, rows, kThreads);
  const int t = threadIdx.x;
  rows[t] = in[t];
  if (!broken) __syncthreads();
  out[t] = rows[(t + 32) % kThreads];
}

__global__ void missing_second_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, rows, kThreads);
  const int t = threadIdx.x;
  float sum = 0;
  for (int round = 0; round < 3; ++round) {
    rows[t] = in[t] * round;
    __syncthreads();
    sum += rows[(t + 1) % kThreads];
    if (!broken) __syncthreads();
  }
  out[t] = sum;
}

__global__ void missing_warp_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, rows, kThreads);
  const int t = threadIdx.x;
  rows[t] = in[t];
  if (!broken) __syncwarp();
  out[t] = rows[t ^ 1];
}

__global__ void warp_barrier_of_others(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, rows, kThreads);
  const int t = threadIdx.x, pair = t % 32 / 2 * 2;
  rows[t] = in[t];
  __syncwarp(3u << pair);
  if (!broken) __syncwarp();
  out[t] = rows[t ^ 2];
}

__global__ void shuffle_as_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, rows, kThreads);
  const int t = threadIdx.x;
  rows[t] = in[t];
  __shfl_sync(kAllLanes, t, 0);
  if (!broken) __syncwarp();
  out[t] = rows[t ^ 1];
}

__global__ void bytes_without_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(uint8_t, codes, kThreads);
  const int t = threadIdx.x;
  codes[t] = static_cast<uint8_t>(in[t]);
  if (!broken) __syncthreads();
  out[t] = codes[(t + 33) % kThreads];
}

__global__ void unprotected_sum(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(int, sum, 1);
  const int t = threadIdx.x;
  if (t == 0) sum[0] = 0;
  __syncthreads();
  if (broken) {
    sum[0] += static_cast<int>(in[t]);
  } else {
    atomicAdd(&sum[0], static_cast<int>(in[t]));
  }
  __syncthreads();
  out[t] = static_cast<float>(sum[0]);
}

__global__ void sum_read_too_early(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(int, sum, 1);
  const int t = threadIdx.x;
  if (t == 0) sum[0] = 0;
  __syncthreads();
  atomicAdd(&sum[0], static_cast<int>(in[t]));
  if (!broken) __syncthreads();
  out[t] = static_cast<float>(sum[0]);
}

// Threads that all write the same do no harm.
__global__ void different_writes(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, same, 1);
  const int t = threadIdx.x;
  same[0] = broken ? static_cast<float>(t) : 1.0f;
  __syncthreads();
  out[t] = in[t] + same[0];
}

__global__ void global_without_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t];
  if (!broken) __syncthreads();
  const float next = out[(t + 40) % kThreads];
  __syncthreads();
  out[t] = next;
}

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

__global__ void divergent_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  if (!broken || t < 16) __syncthreads();
  out[t] = in[t];
  __syncthreads();
}

__global__ void barrier_against_shuffle(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  if (!broken || t < 16) __syncthreads();
  if (!broken || t >= 16) out[t] = __shfl_xor_sync(kAllLanes, __shfl_xor_sync(kAllLanes, in[t], 1), 1);
}

__global__ void absent_lane(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t];
  if (broken && t == 5) return;
  const float sum = __shfl_xor_sync(kAllLanes, in[t], 1);
  if (broken) out[t] = sum;
}

__global__ void mask_without_caller(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = __any_sync(broken ? 1u : 1u << t % 32, 0) ? 0 : in[t];
}

__global__ void different_masks(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = __shfl_sync(broken && t % 32 >= 16 ? 0xFFFF8000u : kAllLanes, in[t], t % 32);
}

__global__ void lane_outside_mask(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t];
  if (t % 32 < 16) out[t] = __shfl_sync(0xFFFFu, in[t], broken ? t + 16 : t % 32);
}

__global__ void forgotten_wait(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float4, rows, kThreads / 4);
  const int t = threadIdx.x;
  if (t < 16) copy_async_16(&rows[t], in + 4 * t, true);
  commit_copies();
  if (!broken) wait_for_copies<0>();
  __syncthreads();
  out[t] = reinterpret_cast<float*>(rows)[t];
}

__global__ void wait_for_too_few(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float4, rows, kThreads / 4);
  const int t = threadIdx.x;
  if (t < 8) copy_async_16(&rows[t], in + 4 * t, true);
  commit_copies();
  if (t >= 8 && t < 16) copy_async_16(&rows[t], in + 4 * t, true);
  commit_copies();
  if (broken) {
    wait_for_copies<1>();
  } else {
    wait_for_copies<0>();
  }
  __syncthreads();
  out[t] = reinterpret_cast<float*>(rows)[t];
}

__global__ void wait_without_barrier(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float4, rows, kThreads / 4);
  const int t = threadIdx.x;
  if (t < 16) copy_async_16(&rows[t], in + 4 * t, true);
  commit_copies();
  wait_for_copies<0>();
  if (!broken) __syncthreads();
  out[t] = reinterpret_cast<float*>(rows)[t];
}

__global__ void forgotten_previous_kernel(const float* in, float* out, bool broken) {
  if (!broken) wait_for_previous_kernel();
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void too_far_shift(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x, by = broken ? t : t % 32;
  out[t] = (1u << by) != 0 ? in[t] : 0;
}

// Kernels of two blocks of 64 threads; what a sum of theirs is made of lies in out[0], out[1], the sum in out[2], the
// number of blocks that have arrived in out[3].
__device__ void leave_part(const float* in, float* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = in[blockIdx.x + 1];
}
__device__ bool arrive(float* out) {
  SPECENGINE_SHARED(bool, last, 1);
  if (threadIdx.x == 0) last[0] = atomicAdd(&out[3], 1.0f) != 0;
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

__global__ void constant_load_of_own_output(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int t = threadIdx.x;
  out[t] = in[t];
  __syncthreads();
  if (t == 0) out[0] = __uint_as_float(load_streaming(broken ? out : in).x);
}

__global__ void endless_wait(const float*, float* out, bool broken) {
  wait_for_previous_kernel();
  const volatile float* const other = out;
  while (broken && *other == 0) {
  }
}

using Kernel = void (*)(const float*, float*, bool);
#define SPECENGINE_PLANTED(name) {#name, name}
const std::map<std::string, Kernel> kKernels = {
    SPECENGINE_PLANTED(missing_barrier),
    SPECENGINE_PLANTED(missing_second_barrier),
    SPECENGINE_PLANTED(missing_warp_barrier),
    SPECENGINE_PLANTED(warp_barrier_of_others),
    SPECENGINE_PLANTED(shuffle_as_barrier),
    SPECENGINE_PLANTED(bytes_without_barrier),
    SPECENGINE_PLANTED(unprotected_sum),
    SPECENGINE_PLANTED(sum_read_too_early),
    SPECENGINE_PLANTED(different_writes),
    SPECENGINE_PLANTED(global_without_barrier),
    SPECENGINE_PLANTED(uninitialised_read),
    SPECENGINE_PLANTED(shared_overrun),
    SPECENGINE_PLANTED(dynamic_shared_overrun),
    SPECENGINE_PLANTED(global_overrun),
    SPECENGINE_PLANTED(global_read_overrun),
    SPECENGINE_PLANTED(copy_overrun),
    SPECENGINE_PLANTED(wild_address),
    SPECENGINE_PLANTED(array_overrun),
    SPECENGINE_PLANTED(misaligned_vector),
    SPECENGINE_PLANTED(misaligned_shared_vector),
    SPECENGINE_PLANTED(divergent_barrier),
    SPECENGINE_PLANTED(barrier_against_shuffle),
    SPECENGINE_PLANTED(absent_lane),
    SPECENGINE_PLANTED(mask_without_caller),
    SPECENGINE_PLANTED(different_masks),
    SPECENGINE_PLANTED(lane_outside_mask),
    SPECENGINE_PLANTED(forgotten_wait),
    SPECENGINE_PLANTED(wait_for_too_few),
    SPECENGINE_PLANTED(wait_without_barrier),
    SPECENGINE_PLANTED(forgotten_previous_kernel),
    SPECENGINE_PLANTED(too_far_shift),
    SPECENGINE_PLANTED(constant_load_of_own_output),
};
const std::map<std::string, Kernel> kKernelsOfTwoBlocks = {
    SPECENGINE_PLANTED(missing_fence), SPECENGINE_PLANTED(fence_of_another_thread), SPECENGINE_PLANTED(no_arrival),
    SPECENGINE_PLANTED(reads_ahead),   SPECENGINE_PLANTED(blocks_overlap),          SPECENGINE_PLANTED(endless_wait),
};

}  // namespace

void sim::run_planted(const std::string& name, const TensorView& in, const TensorView& out, bool broken) {
  const auto call = [&](const LaunchConfig& config, Kernel kernel) {
    launch(config, kernel, in.as<float>(), out.as<float>(), broken);
  };
  const Kernel copy = kKernels.at("global_overrun");
  const unsigned size = broken;
  if (name == "too_many_threads") return call({"planted", 1, kThreads + size * 1024, 0, nullptr}, copy);
  if (name == "no_blocks") return call({"planted", 1 - size, kThreads, 0, nullptr}, copy);
  if (name == "too_many_rows_of_blocks")
    return call({"planted", dim3(1, 1 + size * 65535), kThreads, 0, nullptr}, copy);
  if (name == "too_much_shared_memory")
    return call({"planted", 1, kThreads, 200 * 1024 + size * 28 * 1024, nullptr}, copy);
  if (name == "host_read") return call({"planted", 1 + (broken && in.as<float>()[0] < 0), kThreads, 0, nullptr}, copy);
  const bool two = kKernelsOfTwoBlocks.count(name) != 0;
  call({"planted", two ? 2u : 1u, kThreads, sizeof(float) * kThreads, nullptr},
       (two ? kKernelsOfTwoBlocks : kKernels).at(name));
}

}  // namespace specengine
