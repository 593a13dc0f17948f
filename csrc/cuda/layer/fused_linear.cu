// Linear layers for at most 8 rows of x that end with the op behind them, by the same code and in the same order.
//
// A gate needs two products, so a block owns rows of both halves of the weight. A norm needs whole rows: the last block
// of all computes it. A head needs its components: the last of its blocks rotates it and writes the cache.
#include "ops/fused/fused_linear.h"

#include <utility>

#include "cuda/attention/rope_head.cuh"
#include "cuda/base/last_block.cuh"
#include "cuda/layer/float_product.cuh"
#include "cuda/layer/rms_norm.cuh"
#include "cuda/layer/silu.cuh"

namespace specengine {
namespace {

// The ends take products as Result does, and finish once the block's products are taken.

template <typename Out>
struct SiluEnd {
  static constexpr bool kPaired = true;
  const float* bias;
  Out* out;
  int rows, columns;  // M and the weight's rows

  __device__ void take(int row, int column, float gate, float up) const {
    const int half = columns / 2;
    if (row >= rows || column >= half) return;
    if (bias != nullptr) gate += bias[column], up += bias[half + column];
    out[static_cast<int64_t>(row) * half + column] = from_float<Out>(Silu{}(gate, up));
  }
  __device__ void finish(int, uint4*) const {}
};

template <typename Out>
struct NormEnd {
  static constexpr bool kPaired = false;
  const float* bias;
  float* residual;
  const float* norm;
  Out* out;
  float* kept;  // nullptr: nowhere
  int64_t kept_step;
  int* arrived;
  int rows, columns;
  float eps;

  template <int kWidth>
  __device__ void take(int row, int column, float value) const {
    if (row >= rows || column >= columns) return;
    if (bias != nullptr) value += bias[column];
    float& stream = residual[static_cast<int64_t>(row) * columns + column];
    stream = value += stream;
    if (kept != nullptr) kept[row * kept_step + column] = value;
  }
  __device__ void finish(int, uint4* shared) const {
    if (!is_last_to_arrive(arrived, static_cast<int>(gridDim.x))) return;
    norm_rows(residual, norm, out, rows, columns, eps, reinterpret_cast<float*>(shared));
  }
};

template <typename Cache>
struct RopeEnd {
  static constexpr bool kPaired = false;
  const float* bias;
  float* qkv;
  Rope rope;
  Cache *k, *v;
  int* arrived;
  int rows, columns;
  int block_rows;

  template <int kWidth>
  __device__ void take(int row, int column, float value) const {
    if (row >= rows || column >= columns) return;
    if (bias != nullptr) value += bias[column];
    qkv[static_cast<int64_t>(row) * columns + column] = value;
  }
  __device__ void finish(int first_row, uint4*) const {
    const int place = first_row / rope.dim;
    if (!is_last_to_arrive(arrived + place, rope.dim / block_rows)) return;
    const bool gated = place < 2 * rope.gates;
    if (gated && place % 2 == 1) return;  // a gate, which gate_heads reads
    const int head = gated ? place / 2 : place - rope.gates;
#pragma unroll 1  // keeps registers
    for (int row = threadIdx.x / kWarp; row < rows; row += blockDim.x / kWarp) rope_head(rope, k, v, row, head);
  }
};

// One block per multiprocessor at least: asked for nothing, nvcc spills for occupancy that shared memory does not
// allow.
template <typename Weight, int kRows, int kWarps, typename End>
__global__ void __launch_bounds__(kWarps* kWarp, 1)
    fused_linear_kernel(const Weight* x, const Weight* weight, End end, int columns) {
  let_next_kernel_start();
  SPECENGINE_DYNAMIC_SHARED(uint4, ring);
  const int first_row = blockIdx.x * kRows;
  const auto x_offset_of = [&](int i) { return min(i, end.rows - 1) * columns; };
  multiply_floats<Weight, kRows, kWarps, 1>(x, x_offset_of, weight, end, columns, 0, first_row, ring,
                                            [] { wait_for_its_data(); });
  end.finish(first_row, ring);
}

template <typename Weight, int kRows, int kWarps, typename End>
void launch_variant(const char* name, const TensorView& x, const TensorView& weight, const End& end) {
  using P = FloatPlan<Weight, kRows, kWarps, 1>;
  static_assert(P::kSharedBytes >= kMostFusedRows * kWarp * sizeof(float));
  const auto blocks = static_cast<unsigned>((weight.shape[0] + kRows - 1) / kRows);
  launch({name, blocks, P::kThreads, P::kSharedBytes, weight.stream}, fused_linear_kernel<Weight, kRows, kWarps, End>,
         x.as<Weight>(), weight.as<Weight>(), end, static_cast<int>(weight.shape[1]));
}

template <typename Weight, typename End, size_t... kPlace>
void launch_chosen(const char* name, const TensorView& x, const TensorView& weight, const End& end, int64_t variant,
                   std::index_sequence<kPlace...>) {
  const size_t chosen = variant == 0 ? 0 : static_cast<size_t>(variant - 1);
  ((chosen == kPlace
        ? launch_variant<Weight, kLinearVariants[kPlace].rows, kLinearVariants[kPlace].warps>(name, x, weight, end)
        : void()),
   ...);
}

template <typename Weight, typename Op, typename End>
void launch_end(const char* name, const Op& op, const End& end) {
  constexpr std::make_index_sequence<std::size(kLinearVariants)> kPlaces;
  launch_chosen<Weight>(name, op.x, op.weight, end, op.variant, kPlaces);
}

template <typename Op>
bool is_empty(const Op& op) {
  return op.x.shape[0] == 0 || op.weight.shape[0] == 0;
}

}  // namespace

void run_cuda(const LinearSilu& op) {
  if (is_empty(op)) return;
  const DeviceGuard guard(op.weight.device_id);
  with_float_type(op.weight.dtype, [&](auto zero) {
    using Weight = decltype(zero);
    launch_end<Weight>("linear_silu", op,
                       SiluEnd<Weight>{op.bias.as<float>(), op.out.as<Weight>(), static_cast<int>(op.x.shape[0]),
                                       static_cast<int>(op.weight.shape[0])});
  });
}

template <typename Weight, typename Out>
void run_norm(const LinearNorm& op) {
  launch_end<Weight>("linear_norm", op,
                     NormEnd<Out>{op.bias.as<float>(), op.residual.as<float>(), op.norm.as<float>(), op.out.as<Out>(),
                                  kept_layer(op.kept, op.place), kept_step(op.kept), op.arrived.as<int>(),
                                  static_cast<int>(op.x.shape[0]), static_cast<int>(op.weight.shape[0]), op.eps});
}

void run_cuda(const LinearNorm& op) {
  if (is_empty(op)) return;
  const DeviceGuard guard(op.weight.device_id);
  with_float_type(op.weight.dtype, [&](auto zero) {
    using Weight = decltype(zero);
    op.out.dtype == DType::kFloat32 ? run_norm<Weight, float>(op) : run_norm<Weight, Weight>(op);
  });
}

void run_cuda(const LinearRope& op) {
  if (is_empty(op)) return;
  const DeviceGuard guard(op.weight.device_id);
  with_float_type(op.weight.dtype, [&](auto zero) {
    using Weight = decltype(zero);
    launch_end<Weight>(
        "linear_rope", op,
        RopeEnd<Weight>{op.bias.as<float>(), op.qkv.as<float>(), rope_of(op.rope()), op.cache.k_cache.as<Weight>(),
                        op.cache.v_cache.as<Weight>(), op.arrived.as<int>(), static_cast<int>(op.x.shape[0]),
                        static_cast<int>(op.weight.shape[0]), static_cast<int>(op.block_rows())});
  });
}

}  // namespace specengine
