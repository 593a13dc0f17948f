// Routing: a warp owns one expert's logits of a few rows, then one row's choice. A lane is a chain of a router's sum. A
// warp's reduction adds the chains in the order of ops/experts/experts.h: logits have the bits of the CPU's.
#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/experts/experts.h"

namespace specengine {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 4;  // that a warp multiplies by one reading of the router
static_assert(kRouterLanes == kWarp && kMostPerToken <= kWarp && kMostExperts <= 32 * kWarp);

template <typename Weight>
__global__ void __launch_bounds__(kWarps* kWarp)
    router_logits_kernel(const float* x, const Weight* router, const float* bias, float* logits, int rows, int columns,
                         int experts) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarp, expert = blockIdx.x * kWarps + threadIdx.x / kWarp;
  const int first = blockIdx.y * kRows, count = min(kRows, rows - first);
  if (expert >= experts) return;
  x += static_cast<int64_t>(first) * columns;
  router += static_cast<int64_t>(expert) * columns;
  float sums[kRows] = {};
#pragma unroll 4
  for (int c = lane; c < columns; c += kWarp) {
    const float weight = to_float(router[c]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < count) sums[i] = fmaf(x[static_cast<int64_t>(i) * columns + c], weight, sums[i]);
    }
  }
  const float added = bias == nullptr ? 0.0f : bias[expert];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float logit = warp_reduce<Sum>(sums[i]) + added;
    if (lane == 0 && i < count) logits[static_cast<int64_t>(first + i) * experts + expert] = logit;
  }
}

struct Choices {
  const float *logits, *x, *shared_gate;
  int* chosen;
  float *weights, *shared_scale;
  int rows, columns, experts, per_token;
  bool renormalise;
};

// Keys order as logits do, ties by lower expert and a NaN above all, whose weights are then NaN.
__device__ inline int largest_untaken(const float* logits, int experts, unsigned taken) {
  long long best = kLeastKey;
  for (int i = 0, e = threadIdx.x % kWarp; e < experts; ++i, e += kWarp) {
    if ((taken >> i & 1) == 0) best = Max::combine<long long>(best, argmax_key(logits[e], e));
  }
  return static_cast<int>(UINT32_MAX - (warp_reduce<Max>(best) & UINT32_MAX));
}

__global__ void __launch_bounds__(kWarps* kWarp) choose_experts_kernel(Choices op) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const float* const logits = op.logits + row * op.experts;
  unsigned taken = 0;  // bit i: expert lane + 32 * i
  float largest = 0, sum = 0, own = 0;
  for (int slot = 0; slot < op.per_token; ++slot) {
    const int expert = largest_untaken(logits, op.experts, taken);
    if (expert % kWarp == lane) taken |= 1u << expert / kWarp;
    if (slot == 0) largest = logits[expert];
    const float weight = expf(logits[expert] - largest);
    sum += weight;
    if (slot == lane) {
      own = weight;
      op.chosen[row * op.per_token + slot] = expert;
    }
  }
  if (!op.renormalise) {
    sum = 0;
    for (int e = lane; e < op.experts; e += kWarp) sum += expf(logits[e] - largest);
    sum = warp_reduce<Sum>(sum);
  }
  if (lane < op.per_token) op.weights[row * op.per_token + lane] = own / sum;
  if (op.shared_gate == nullptr) return;
  float gate = 0;
  for (int c = lane; c < op.columns; c += kWarp) gate = fmaf(op.x[row * op.columns + c], op.shared_gate[c], gate);
  gate = warp_reduce<Sum>(gate);
  if (lane == 0) op.shared_scale[row] = 1.0f / (1.0f + expf(-gate));
}

}  // namespace

void run_cuda(const RouteRows& op) {
  const int rows = static_cast<int>(op.x.shape[0]), columns = static_cast<int>(op.x.shape[1]);
  const int experts = static_cast<int>(op.router.shape[0]), per_token = static_cast<int>(op.experts.shape[1]);
  if (rows == 0) return;
  const DeviceGuard guard(op.x.device_id);
  const dim3 grid((experts + kWarps - 1) / kWarps, (rows + kRows - 1) / kRows);
  const float* bias = op.bias.defined() ? op.bias.as<float>() : nullptr;
  with_float_type(op.router.dtype, [&](auto zero) {
    using Weight = decltype(zero);
    launch({"route_rows", grid, kWarps * kWarp, 0, op.x.stream}, router_logits_kernel<Weight>, op.x.as<float>(),
           op.router.as<Weight>(), bias, op.logits.as<float>(), rows, columns, experts);
  });
  const bool shared = op.shared_gate.defined();
  const Choices choices{op.logits.as<float>(),
                        op.x.as<float>(),
                        shared ? op.shared_gate.as<float>() : nullptr,
                        op.experts.as<int>(),
                        op.weights.as<float>(),
                        shared ? op.shared_scale.as<float>() : nullptr,
                        rows,
                        columns,
                        experts,
                        per_token,
                        op.renormalise};
  const unsigned blocks = (rows + kWarps - 1) / kWarps;
  launch({"route_rows", blocks, kWarps * kWarp, 0, op.x.stream}, choose_experts_kernel, choices);
}

}  // namespace specengine
