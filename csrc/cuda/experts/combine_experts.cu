// Adds the outputs of a row's experts. A thread owns four columns of a row, and adds its slots in their order.
#include "cuda/base/four_columns.cuh"
#include "ops/experts/experts.h"

namespace specengine {
namespace {

constexpr int kThreads = 256;

struct Slots {
  const float* y;
  const int* places;
  const float *weights, *shared, *shared_scale;
  int per_token, columns;
};

__device__ inline void add_scaled(float4& sum, float scale, const float4& x) {
  sum = {fmaf(scale, x.x, sum.x), fmaf(scale, x.y, sum.y), fmaf(scale, x.z, sum.z), fmaf(scale, x.w, sum.w)};
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) combine_experts_kernel(Slots op, float* out) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const int c = 4 * (blockIdx.y * kThreads + threadIdx.x), count = op.columns - c;
  if (count <= 0) return;
  float4 sum = {};
  for (int slot = 0; slot < op.per_token; ++slot) {
    const int64_t place = op.places[row * op.per_token + slot];
    add_scaled(sum, op.weights[row * op.per_token + slot], load_four<kAligned>(op.y + place * op.columns + c, count));
  }
  if (op.shared != nullptr) {
    const float scale = op.shared_scale == nullptr ? 1.0f : op.shared_scale[row];
    add_scaled(sum, scale, load_four<kAligned>(op.shared + row * op.columns + c, count));
  }
  store_four<kAligned>(out + row * op.columns + c, sum, count);
}

}  // namespace

void run_cuda(const CombineExperts& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.out.device_id);
  const int columns = static_cast<int>(op.out.shape[1]);
  const bool shared = op.shared.defined(), aligned = rows_are_aligned(columns, {&op.y, &op.shared, &op.out});
  const Slots slots{op.y.as<float>(),
                    op.places.as<int>(),
                    op.weights.as<float>(),
                    shared ? op.shared.as<float>() : nullptr,
                    op.shared_scale.defined() ? op.shared_scale.as<float>() : nullptr,
                    static_cast<int>(op.places.shape[1]),
                    columns};
  const dim3 grid(static_cast<unsigned>(op.out.shape[0]), (columns + 4 * kThreads - 1) / (4 * kThreads));
  launch({"combine_experts", grid, kThreads, 0, op.out.stream},
         aligned ? combine_experts_kernel<true> : combine_experts_kernel<false>, slots, op.out.as<float>());
}

}  // namespace specengine
