// The product of linear.cu for the places of every expert. A block owns some rows of an expert's weight and one tile of
// its places.
//
// All plans have 8 warps, and a row's sums depend on the number of warps alone.
#include "cuda/experts/tiles.cuh"
#include "cuda/layer/float_product.cuh"
#include "ops/experts/experts.h"

namespace specengine {
namespace {

constexpr int kWarps = 8;

// result: of expert 0 and of all places.  expert_rows: of an expert, in the weight.
template <typename Weight, int kRows, int kGroups>
__global__ void __launch_bounds__(kWarps* kWarp)
    expert_linear_kernel(const Weight* x, const int* rows, const Weight* weight, const int* starts, Result result,
                         int columns, int experts, int expert_rows) {
  wait_for_previous_kernel();
  SPECENGINE_DYNAMIC_SHARED(uint4, ring);
  const ExpertTile tile = expert_tile<kGroups * kGroup>(starts, experts, blockIdx.x);
  if (tile.expert < 0) return;
  weight += static_cast<int64_t>(tile.expert) * expert_rows * columns;
  multiply_floats<Weight, kRows, kWarps, kGroups>(x, TileRows{rows, tile, columns}, weight, of_tile(result, tile),
                                                  columns, tile.first, blockIdx.y * kRows, ring, [] {});
}

template <typename Weight, int kRows, int kGroups>
void launch_plan(const ExpertLinear& op) {
  using P = FloatPlan<Weight, kRows, kWarps, kGroups>;
  const dim3 grid = tiles_and_columns(op, kGroups * kGroup, kRows);
  launch({"expert_linear", grid, P::kThreads, P::kSharedBytes, op.weight.stream},
         expert_linear_kernel<Weight, kRows, kGroups>, op.x.as<Weight>(),
         op.rows.defined() ? op.rows.as<int>() : nullptr, op.weight.as<Weight>(), op.starts.as<int>(), result_of(op),
         static_cast<int>(op.weight.shape[1]), static_cast<int>(op.starts.shape[0] - 1),
         static_cast<int>(op.panels() * kPanel));
}

// Tiles have room for about twice the places that an expert has on average.
template <typename Weight>
void launch_for(const ExpertLinear& op) {
  if constexpr (sizeof(Weight) == 4) {
    launch_plan<Weight, 16, 1>(op);
  } else {
    const int64_t places = op.out.shape[0], experts = op.starts.shape[0] - 1;
    if (places <= 4 * experts) return launch_plan<Weight, 16, 1>(op);
    if (places <= 8 * experts) return launch_plan<Weight, 32, 2>(op);
    if (places <= 16 * experts) return launch_plan<Weight, 32, 4>(op);
    launch_plan<Weight, 32, 8>(op);
  }
}

}  // namespace

void run_cuda(const ExpertLinear& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  with_float_type(op.weight.dtype, [&](auto zero) { launch_for<decltype(zero)>(op); });
}

}  // namespace specengine
