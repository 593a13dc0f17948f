// The product of expert_linear.cu with weights in codes.
#include "cuda/experts/tiles.cuh"
#include "cuda/layer/coded_product.cuh"
#include "ops/experts/coded_experts.h"

namespace specengine {
namespace {

// result: of expert 0 and of all places.
template <CodedKind kKind, CodedValue kValue, int kRows, int kGroups>
__global__ void __launch_bounds__(kCodedWarps* kWarp, 1)
    coded_expert_linear_kernel(const BFloat16* x, const int* rows, const unsigned char* weight, CodedChunk form,
                               const int* starts, Result result, int columns, int experts) {
  wait_for_previous_kernel();
  SPECENGINE_DYNAMIC_SHARED(uint4, ring);
  const ExpertTile tile = expert_tile<kGroups * kGroup>(starts, experts, blockIdx.x);
  if (tile.expert < 0) return;
  const int64_t panels = (result.columns + kCodedRows - 1) / kCodedRows;
  const int64_t chunks = (columns + kCodedColumns - 1) / kCodedColumns;
  weight += tile.expert * panels * chunks * form.bytes;
  multiply_codes<kKind, kValue, kRows, kGroups>(x, TileRows{rows, tile, columns}, weight, form, of_tile(result, tile),
                                                columns, tile.first, blockIdx.y * kRows, ring, [] {});
}

template <CodedKind kKind, CodedValue kValue, int kRows, int kGroups>
void launch_plan(const CodedExpertLinear& op, const CodedChunk& form) {
  using P = CodedPlan<kKind, kRows, kGroups>;
  const dim3 grid = tiles_and_columns(op, kGroups * kGroup, kRows);
  launch({"coded_expert_linear", grid, P::kThreads,
          static_cast<size_t>(P::kStages * kCodedWarps * P::kTiles * form.bytes), op.weight.stream},
         coded_expert_linear_kernel<kKind, kValue, kRows, kGroups>, op.x.as<BFloat16>(),
         op.rows.defined() ? op.rows.as<int>() : nullptr, op.weight.as<unsigned char>(), form, op.starts.as<int>(),
         result_of(op), static_cast<int>(op.x.shape[1]), static_cast<int>(op.starts.shape[0] - 1));
}

// Tiles as those of expert_linear.cu.
template <CodedKind kKind, CodedValue kValue>
void launch_kind(const CodedExpertLinear& op, const CodedChunk& form) {
  const int64_t places = op.out.shape[0], experts = op.starts.shape[0] - 1;
  if (places <= 4 * experts) return launch_plan<kKind, kValue, 32, 1>(op, form);
  if (places <= 16 * experts) return launch_plan<kKind, kValue, 32, 4>(op, form);
  launch_plan<kKind, kValue, 32, 8>(op, form);
}

}  // namespace

void run_cuda(const CodedExpertLinear& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const CodedChunk form = op.form.chunk();
  with_kind(form, [&](auto kind, auto value) { launch_kind<kind, value>(op, form); });
}

}  // namespace specengine
