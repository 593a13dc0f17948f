// The gates of attention. A thread owns a component of a head.
#include "cuda/base/arch.cuh"
#include "ops/layer.h"

namespace specengine {
namespace {

constexpr int kThreads = 256;

template <typename Head>
__global__ void __launch_bounds__(kThreads)
    gate_heads_kernel(const float* qkv, Head* heads, int count, int dim, int columns) {
  wait_for_previous_kernel();
  const int row = blockIdx.x, i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= count * dim) return;
  const int head = i / dim;
  const float gate = qkv[static_cast<int64_t>(row) * columns + (head + 1) * dim + i];  // behind head's q
  Head& own = heads[static_cast<int64_t>(row) * count * dim + i];
  own = from_float<Head>(to_float(own) / (1.0f + expf(-gate)));
}

}  // namespace

void run_cuda(const GateHeads& op) {
  if (op.heads.numel() == 0) return;
  const DeviceGuard guard(op.heads.device_id);
  const int count = static_cast<int>(op.heads.shape[1]), dim = static_cast<int>(op.heads.shape[2]);
  const dim3 grid(static_cast<unsigned>(op.heads.shape[0]), (count * dim + kThreads - 1) / kThreads);
  with_float_type(op.heads.dtype, [&](auto zero) {
    using Head = decltype(zero);
    launch({"gate_heads", grid, kThreads, 0, op.heads.stream}, gate_heads_kernel<Head>, op.qkv.as<float>(),
           op.heads.as<Head>(), count, dim, static_cast<int>(op.qkv.shape[1]));
  });
}

}  // namespace specengine
