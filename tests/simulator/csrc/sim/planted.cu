// Planted bugs of barriers, lanes and waits, and the launches of all planted kernels.
#include "sim/planted.h"

#include <cstring>
#include <stdexcept>

#include "cuda/base/arch.cuh"
#include "sim/module.h"

namespace specengine {
namespace {

constexpr int kThreads = sim::kPlantedThreads;
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

// Not local to a function: the guard of such a variable is an atomic that the hooks do not have.
const sim::PlantedKernels kKernels = {
    SPECENGINE_PLANTED(missing_barrier),      SPECENGINE_PLANTED(missing_second_barrier),
    SPECENGINE_PLANTED(missing_warp_barrier), SPECENGINE_PLANTED(warp_barrier_of_others),
    SPECENGINE_PLANTED(shuffle_as_barrier),   SPECENGINE_PLANTED(bytes_without_barrier),
    SPECENGINE_PLANTED(unprotected_sum),      SPECENGINE_PLANTED(sum_read_too_early),
    SPECENGINE_PLANTED(different_writes),     SPECENGINE_PLANTED(global_without_barrier),
    SPECENGINE_PLANTED(divergent_barrier),    SPECENGINE_PLANTED(barrier_against_shuffle),
    SPECENGINE_PLANTED(absent_lane),          SPECENGINE_PLANTED(mask_without_caller),
    SPECENGINE_PLANTED(different_masks),      SPECENGINE_PLANTED(lane_outside_mask),
    SPECENGINE_PLANTED(forgotten_wait),       SPECENGINE_PLANTED(wait_for_too_few),
    SPECENGINE_PLANTED(wait_without_barrier), SPECENGINE_PLANTED(forgotten_previous_kernel),
    SPECENGINE_PLANTED(too_far_shift),
};

}  // namespace

void sim::run_planted(const std::string& name, const TensorView& in, const TensorView& out, bool broken) {
  const auto call = [&](const LaunchConfig& config, PlantedKernel kernel) {
    launch(config, kernel, in.as<float>(), out.as<float>(), broken);
  };
  const PlantedKernel copy = planted_memory_kernels().at("global_overrun");
  const unsigned size = broken;
  if (name == "too_many_threads") return call({"planted", 1, kThreads + size * 1024, 0, nullptr}, copy);
  if (name == "no_blocks") return call({"planted", 1 - size, kThreads, 0, nullptr}, copy);
  if (name == "too_many_rows_of_blocks")
    return call({"planted", dim3(1, 1 + size * 65535), kThreads, 0, nullptr}, copy);
  if (name == "too_much_shared_memory")
    return call({"planted", 1, kThreads, 200 * 1024 + size * 28 * 1024, nullptr}, copy);
  if (name == "host_read") return call({"planted", 1 + (broken && in.as<float>()[0] < 0), kThreads, 0, nullptr}, copy);
  for (const PlantedKernels* table : {&kKernels, &planted_memory_kernels(), &planted_block_kernels()}) {
    const auto found = table->find(name);
    if (found == table->end()) continue;
    const unsigned blocks = table == &planted_block_kernels() ? 2 : 1;
    return call({"planted", blocks, kThreads, sizeof(float) * kThreads, nullptr}, found->second);
  }
  throw std::out_of_range("name: there is no planted kernel " + name);
}

}  // namespace specengine
