// A block owns a row; a thread owns every kThreads-th group of four columns and keeps the first kHeld groups in
// registers between the two passes.
#include "cuda/layer/rms_norm.cuh"
#include "ops/layer.h"

namespace specengine {
namespace {

// kKept: whether the residual is also written to a layer of `kept`. Then registers have no room for weights ahead.
template <typename Out, bool kAligned, bool kKept>
__global__ void __launch_bounds__(kMostThreads)
    rms_norm_kernel(float* residual, const float* delta, const float* weights, Out* out, float* kept, int64_t kept_step,
                    int columns, int turns, float eps) {
  SPECENGINE_SHARED(float, scratch, kWarp);
  wait_for_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * columns;
  const float* const weight = weights + blockIdx.x % turns * columns;
  const int step = 4 * blockDim.x;
  float sum = 0;
  const auto add = [&](int c, float4& x, const float4& d) {
    if (delta != nullptr) {
      x = {x.x + d.x, x.y + d.y, x.z + d.z, x.w + d.w};
      store_four<kAligned>(residual + first + c, x, columns - c);
    }
    if constexpr (kKept) store_four<kAligned>(kept + blockIdx.x * kept_step + c, x, columns - c);
    sum = add_squares(x, sum);
  };
  float4 held[kHeld] = {}, other[kHeld] = {};  // all loads come before the first store, which could alias them
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = 4 * threadIdx.x + i * step;
    if (c < columns) held[i] = load_four<kAligned>(residual + first + c, columns - c);
    if (c < columns && delta != nullptr) other[i] = load_four<kAligned>(delta + first + c, columns - c);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = 4 * threadIdx.x + i * step;
    if (c < columns) add(c, held[i], other[i]);
    if (!kKept && c < columns) other[i] = load_four<kAligned>(weight + c, columns - c);  // needs no reduction
  }
  for (int c = 4 * threadIdx.x + kHeld * step; c < columns; c += step) {
    float4 x = load_four<kAligned>(residual + first + c, columns - c), d{};
    if (delta != nullptr) d = load_four<kAligned>(delta + first + c, columns - c);
    add(c, x, d);
  }

  const float scale = norm_scale(block_reduce<Sum>(sum, scratch), columns, eps);
  const auto put = [&](int c, const float4& x, const float4& w) {
    store_four<kAligned>(out + first + c, normed(x, scale, w), columns - c);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = 4 * threadIdx.x + i * step;
    if (c < columns) put(c, held[i], kKept ? load_four<kAligned>(weight + c, columns - c) : other[i]);
  }
  for (int c = 4 * threadIdx.x + kHeld * step; c < columns; c += step) {
    put(c, load_four<kAligned>(residual + first + c, columns - c), load_four<kAligned>(weight + c, columns - c));
  }
}

template <typename Out, bool kAligned, bool kKept>
void launch_for(const RmsNorm& op) {
  const int columns = static_cast<int>(op.residual.shape[1]);
  launch({"rms_norm", static_cast<unsigned>(op.residual.shape[0]), norm_threads(columns), 0, op.residual.stream},
         rms_norm_kernel<Out, kAligned, kKept>, op.residual.as<float>(), op.delta.as<float>(), op.weight.as<float>(),
         op.out.as<Out>(), kept_layer(op.kept, op.place), kept_step(op.kept), columns, static_cast<int>(op.weights()),
         op.eps);
}

}  // namespace

void run_cuda(const RmsNorm& op) {
  if (op.residual.numel() == 0) return;
  const DeviceGuard guard(op.residual.device_id);
  const bool aligned = rows_are_aligned(op.residual.shape[1], {&op.residual, &op.delta, &op.weight, &op.out, &op.kept});
  with_float_type(op.out.dtype, [&](auto zero) {
    using Out = decltype(zero);
    const bool kept = op.kept.given();
    if (aligned) return kept ? launch_for<Out, true, true>(op) : launch_for<Out, true, false>(op);
    kept ? launch_for<Out, false, true>(op) : launch_for<Out, false, false>(op);
  });
}

}  // namespace specengine
