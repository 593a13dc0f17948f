// Rotary positions and the cache write. A warp owns one head of one row (query, key or value).
#include "cuda/attention/rope_head.cuh"
#include "cuda/base/arch.cuh"

namespace specengine {
namespace {

constexpr int kWarps = 4;

template <typename Cache>
__global__ void __launch_bounds__(kWarps* kWarp) rope_cache_kernel(Rope op, Cache* k, Cache* v) {
  wait_for_previous_kernel();
  const int head = blockIdx.y * kWarps + threadIdx.x / kWarp;
  if (head < op.heads + 2 * op.kv_heads) rope_head(op, k, v, blockIdx.x, head);
}

}  // namespace

void run_cuda(const RopeCache& op) {
  if (op.qkv.numel() == 0) return;
  const DeviceGuard guard(op.q.device_id);
  const Rope rope = rope_of(op);
  const dim3 grid(static_cast<unsigned>(op.q.shape[0]), (rope.heads + 2 * rope.kv_heads + kWarps - 1) / kWarps);
  with_float_type(op.cache.k_cache.dtype, [&](auto zero) {
    using Cache = decltype(zero);
    launch({"rope_cache", grid, kWarps * kWarp, 0, op.q.stream}, rope_cache_kernel<Cache>, rope,
           op.cache.k_cache.as<Cache>(), op.cache.v_cache.as<Cache>());
  });
}

}  // namespace specengine
