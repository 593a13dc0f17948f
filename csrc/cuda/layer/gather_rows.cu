// The embedding lookup. A thread owns one element of a row.
#include "cuda/base/arch.cuh"
#include "ops/packed_weight.h"

namespace specengine {
namespace {

constexpr int kThreads = 256;

template <typename Weight>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const Weight* weight, const int* ids, float* out, int64_t rows, int64_t columns) {
  wait_for_previous_kernel();
  const int64_t m = blockIdx.x, column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const int id = ids[m];
  if (column >= columns) return;
  out[m * columns + column] = id >= 0 && id < rows ? to_float(weight[id * columns + column]) : 0.0f;
}

template <typename Weight>
void launch_for(const GatherRows& op) {
  const int64_t columns = op.out.shape[1];
  const dim3 grid(static_cast<unsigned>(op.ids.shape[0]), static_cast<unsigned>((columns + kThreads - 1) / kThreads));
  launch({"gather_rows", grid, kThreads, 0, op.weight.stream}, gather_rows_kernel<Weight>, op.weight.as<Weight>(),
         op.ids.as<int>(), op.out.as<float>(), op.weight.shape[0], columns);
}

}  // namespace

void run_cuda(const GatherRows& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  with_float_type(op.weight.dtype, [&](auto zero) { launch_for<decltype(zero)>(op); });
}

}  // namespace specengine
