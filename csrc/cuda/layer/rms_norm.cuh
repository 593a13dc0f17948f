// The norm of a row, by a block of its own or by the last block of the product before. The order of the sum depends on
// the number of columns alone: thread t of norm_threads adds every so many groups of four columns, warps add their
// lanes, and the row adds its warps in order.
#pragma once
#include "base/check.h"
#include "base/host_device.h"
#include "cuda/base/four_columns.cuh"
#include "cuda/base/reduce.cuh"

namespace specengine {

// The layer `place` of an optional [M, L, C], and from row to row.
inline float* kept_layer(const OptionalTensor& kept, int64_t place) {
  return kept.given() ? kept.as<float>() + place * kept.shape[2] : nullptr;
}
inline int64_t kept_step(const OptionalTensor& kept) { return kept.given() ? kept.shape[1] * kept.shape[2] : 0; }

constexpr int kMostThreads = 1024;
constexpr int kHeld = 4;  // groups that a thread keeps in registers

// Few warps make the reduction short; many warps let longer rows fit in registers.
SPECENGINE_HOST_DEVICE inline int norm_threads(int columns) {
  const int fours = (columns + 3) / 4, held = (fours + kHeld - 1) / kHeld, few = fours < 256 ? fours : 256;
  const int wanted = few > held ? few : held, threads = (wanted + kWarp - 1) / kWarp * kWarp;
  return threads < kMostThreads ? threads : kMostThreads;
}

__device__ inline float add_squares(const float4& x, float sum) {
  return fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, sum))));
}

__device__ inline float norm_scale(float sum, int columns, float eps) {
  return 1.0f / sqrtf(sum / static_cast<float>(columns) + eps);
}

__device__ inline float4 normed(const float4& x, float scale, const float4& weight) {
  return {x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w};
}

// Rows that start on 16-byte boundaries, by a whole block whose threads see them. A warp owns a warp of norm_threads
// at a time.  parts: shared, kWarp floats for each row.
template <typename Out>
__device__ inline void norm_rows(const float* rows, const float* weight, Out* out, int count, int columns, float eps,
                                 float* parts) {
  const int threads = norm_threads(columns), warps = threads / kWarp, step = 4 * threads, lane = threadIdx.x % kWarp;
  const auto by_warps = [&](const auto& body) {
    for (int i = threadIdx.x / kWarp; i < count * warps; i += blockDim.x / kWarp) {
      body(i / warps, i % warps, 4 * (i % warps * kWarp + lane));
    }
  };
  by_warps([&](int row, int warp, int first) {
    const float* const x = rows + static_cast<int64_t>(row) * columns;
    float sum = 0;
#pragma unroll 4
    for (int c = first; c < columns; c += step) sum = add_squares(load_four<true>(x + c, 4), sum);
    sum = warp_reduce<Sum>(sum);
    if (lane == 0) parts[row * kWarp + warp] = sum;
  });
  __syncthreads();
  by_warps([&](int row, int, int first) {
    float sum = parts[row * kWarp];
    for (int i = 1; i < warps; ++i) sum += parts[row * kWarp + i];
    const float scale = norm_scale(sum, columns, eps);
    const int64_t at = static_cast<int64_t>(row) * columns;
#pragma unroll 2
    for (int c = first; c < columns; c += step) {
      store_four<true>(out + at + c, normed(load_four<true>(rows + at + c, 4), scale, load_four<true>(weight + c, 4)),
                       4);
    }
  });
}

}  // namespace specengine
