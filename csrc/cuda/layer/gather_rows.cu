// The embedding lookup. A thread owns one element of a row; where the norm of the row follows, a block owns the row.
#include "cuda/base/arch.cuh"
#include "cuda/layer/rms_norm.cuh"
#include "ops/fused/gather_norm.h"
#include "ops/packed_weight.h"

namespace specengine {
namespace {

constexpr int kThreads = 256;

template <typename Weight, typename Id, typename Out>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const Weight* weight, const Id* ids, Out* out, int64_t rows, int64_t columns) {
  wait_for_previous_kernel();
  const int64_t m = blockIdx.x, column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const Id id = ids[m];
  if (column >= columns) return;
  out[m * columns + column] = from_float<Out>(id >= 0 && id < rows ? to_float(weight[id * columns + column]) : 0.0f);
}

template <typename Weight, typename Out>
__global__ void __launch_bounds__(kMostThreads)
    gather_norm_kernel(const Weight* weight, const int* ids, float* residual, const float* norm, Out* out, float* kept,
                       int64_t kept_step, int64_t rows, int columns, float eps) {
  SPECENGINE_SHARED(float, parts, kWarp);
  wait_for_previous_kernel();
  const int id = ids[blockIdx.x];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * columns;
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    const float x = id >= 0 && id < rows ? to_float(weight[static_cast<int64_t>(id) * columns + c]) : 0.0f;
    residual[first + c] = x;
    if (kept != nullptr) kept[blockIdx.x * kept_step + c] = x;
  }
  __syncthreads();
  norm_rows(residual + first, norm, out + first, 1, columns, eps, parts);
}

template <typename Weight, typename Id, typename Out>
void launch_for(const GatherRows& op) {
  const int64_t columns = op.out.shape[1];
  const dim3 grid(static_cast<unsigned>(op.ids.shape[0]), static_cast<unsigned>((columns + kThreads - 1) / kThreads));
  launch({"gather_rows", grid, kThreads, 0, op.weight.stream}, gather_rows_kernel<Weight, Id, Out>,
         op.weight.as<Weight>(), op.ids.as<Id>(), op.out.as<Out>(), op.weight.shape[0], columns);
}

}  // namespace

void run_cuda(const GatherRows& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  with_float_type(op.weight.dtype, [&](auto from) {
    with_float_type(op.out.dtype, [&](auto to) {
      op.ids.dtype == DType::kInt64 ? launch_for<decltype(from), int64_t, decltype(to)>(op)
                                    : launch_for<decltype(from), int, decltype(to)>(op);
    });
  });
}

void run_cuda(const GatherNorm& op) {
  if (op.residual.numel() == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const int columns = static_cast<int>(op.residual.shape[1]);
  with_float_type(op.weight.dtype, [&](auto zero) {
    using Weight = decltype(zero);
    with_float_type(op.out.dtype, [&](auto out) {
      using Out = decltype(out);
      launch({"gather_norm", static_cast<unsigned>(op.ids.shape[0]), static_cast<unsigned>(norm_threads(columns)), 0,
              op.weight.stream},
             gather_norm_kernel<Weight, Out>, op.weight.as<Weight>(), op.ids.as<int>(), op.residual.as<float>(),
             op.norm.as<float>(), op.out.as<Out>(), kept_layer(op.kept, op.place), kept_step(op.kept),
             op.weight.shape[0], columns, op.eps);
    });
  });
}

}  // namespace specengine
