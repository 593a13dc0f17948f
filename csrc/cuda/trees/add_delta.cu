// A thread owns an element. Floor: 8 bytes read per element, and what is written.
#include "ops/growth/add_delta.h"

#include "cuda/base/arch.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    add_delta_kernel(const float* x, const float* delta, float* sum, Out* out, int64_t count, bool silu) {
  wait_for_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float own = delta[i], added = silu ? own / (1.0f + expf(-own)) : own;
  const float total = x == nullptr ? added : x[i] + added;
  if (sum != nullptr) sum[i] = total;
  if (out != nullptr) out[i] = from_float<Out>(total);
}

}  // namespace

void run_cuda(const AddDelta& op) {
  const int64_t count = op.delta.numel();
  if (count == 0) return;
  const DeviceGuard guard(op.delta.device_id);
  const unsigned blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  with_float_type(op.out.given() ? op.out.dtype : DType::kFloat32, [&](auto to) {
    using Out = decltype(to);
    launch({"add_delta", blocks, kThreads, 0, op.delta.stream}, add_delta_kernel<Out>, op.x.as<float>(),
           op.delta.as<float>(), op.sum.as<float>(), op.out.as<Out>(), count, op.silu);
  });
}

}  // namespace specengine
