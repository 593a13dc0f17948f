// The gates of MLPs. A thread owns four columns of a row's output.
#include "cuda/base/four_columns.cuh"
#include "cuda/layer/silu.cuh"
#include "ops/layer.h"

namespace specengine {
namespace {

constexpr int kThreads = 256;

// Comparisons, because fminf and fmaxf would drop a NaN.
struct Clamped {
  float limit, alpha;
  __device__ float operator()(float gate, float up) const {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return (up + 1.0f) * (gate / (1.0f + expf(-alpha * gate)));
  }
};

template <typename Out, bool kAligned, typename Gate>
__device__ inline void gate_columns(Gate gated, const float* gate_up, Out* out, int columns) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const int c = 4 * (blockIdx.y * kThreads + threadIdx.x), count = columns - c;
  if (count <= 0) return;
  const float4 gate = load_four<kAligned>(gate_up + row * 2 * columns + c, count);
  const float4 up = load_four<kAligned>(gate_up + row * 2 * columns + columns + c, count);
  const float4 y = {gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w)};
  store_four<kAligned>(out + row * columns + c, y, count);
}

template <typename Out, bool kAligned>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const float* gate_up, Out* out, int columns) {
  gate_columns<Out, kAligned>(Silu{}, gate_up, out, columns);
}

template <typename Out, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    clamped_swiglu_kernel(Clamped gate, const float* gate_up, Out* out, int columns) {
  gate_columns<Out, kAligned>(gate, gate_up, out, columns);
}

template <typename Out, bool kAligned>
void launch_for(const SiluMul& op, dim3 grid, int columns) {
  launch({"silu_mul", grid, kThreads, 0, op.out.stream}, silu_mul_kernel<Out, kAligned>, op.gate_up.as<float>(),
         op.out.as<Out>(), columns);
}

template <typename Out, bool kAligned>
void launch_for(const ClampedSwiglu& op, dim3 grid, int columns) {
  launch({"clamped_swiglu", grid, kThreads, 0, op.out.stream}, clamped_swiglu_kernel<Out, kAligned>,
         Clamped{op.limit, op.alpha}, op.gate_up.as<float>(), op.out.as<Out>(), columns);
}

template <typename Op>
void run_gate(const Op& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.out.device_id);
  const int columns = static_cast<int>(op.out.shape[1]);
  const dim3 grid(static_cast<unsigned>(op.out.shape[0]), (columns + 4 * kThreads - 1) / (4 * kThreads));
  const bool aligned = rows_are_aligned(columns, {&op.gate_up, &op.out});
  with_float_type(op.out.dtype, [&](auto zero) {
    using Out = decltype(zero);
    aligned ? launch_for<Out, true>(op, grid, columns) : launch_for<Out, false>(op, grid, columns);
  });
}

}  // namespace

void run_cuda(const SiluMul& op) { run_gate(op); }
void run_cuda(const ClampedSwiglu& op) { run_gate(op); }

}  // namespace specengine
