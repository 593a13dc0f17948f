// Skinny GEMM: reads a weight once for up to 64 rows of x. Warps take turns along the columns, 64 bytes of every row at
// a time; product.cuh adds their sums.
//
// A lane copies to shared memory, several steps ahead, the pieces of the weight that it will multiply itself, so the
// loop has no barrier. A piece is 16 consecutive bytes of one row: the tensor cores want other columns than these in a
// lane's registers, but the order of a sum's terms is free as long as both factors keep to it.
#include "ops/linear.h"

#include <utility>

#include "cuda/layer/product.cuh"

namespace specengine {
namespace {

constexpr int kStepBytes = 64;    // of a row
constexpr int kRing = 48 * 1024;  // bytes of the weight on their way to a block, about

template <typename Weight>
constexpr int kPiece = sizeof(uint4) / sizeof(Weight);  // columns
template <typename Weight>
constexpr int kStep = kStepBytes / sizeof(Weight);  // columns

template <typename Weight, int kRows, int kWarps, int kGroups>
struct Plan {
  static constexpr int kTiles = kRows / kTile, kThreads = kWarps * kWarp;
  static constexpr int kStageBytes = kWarps * kRows * kStepBytes;
  static constexpr int kStages = kRing / kStageBytes < 3 ? 3 : kRing / kStageBytes > 6 ? 6 : kRing / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

template <typename Weight, int kRows, int kWarps, int kGroups>
__global__ void __launch_bounds__(kWarps* kWarp)
    linear_kernel(const Weight* x, const Weight* weight, Result result, int columns) {
  using P = Plan<Weight, kRows, kWarps, kGroups>;
  using WarpSums = Sums<Weight, P::kTiles, kGroups>;
  wait_for_previous_kernel();
  SPECENGINE_DYNAMIC_SHARED(uint4, ring);

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int x_tiles = (result.rows + kGroups * kGroup - 1) / (kGroups * kGroup);
  const int first_x_row = blockIdx.x % x_tiles * kGroups * kGroup;  // blocks that share weights are neighbours
  const int first_row = blockIdx.x / x_tiles * kRows;
  const int row = first_row + lane / kQuad, first_column = warp * kStep<Weight> + lane % kQuad * kPiece<Weight>;
  const int steps = (columns + kStep<Weight> - 1) / kStep<Weight>;
  const int my_steps = (steps - warp + kWarps - 1) / kWarps;

  weight += static_cast<int64_t>(row) * columns + first_column;
  x += static_cast<int64_t>(first_x_row) * columns + first_column;
  int x_offset[WarpSums::kPieces];
#pragma unroll
  for (int i = 0; i < WarpSums::kPieces; ++i) {
    // The sums of a row of x past the end are not used: any row serves.
    x_offset[i] = min(WarpSums::x_row(i, lane), result.rows - 1 - first_x_row) * columns;
  }
  uint4* const slots = ring + warp * 2 * P::kTiles * kWarp + lane;  // of stage 0
  constexpr int kStageSlots = P::kStageBytes / static_cast<int>(sizeof(uint4));
  const auto fetch = [&](int step, int stage) {
    const int column = step * kWarps * kStep<Weight>;
#pragma unroll
    for (int i = 0; i < 2 * P::kTiles; ++i) {
      const bool exists = row + i * 8 < result.columns && first_column + column < columns;
      copy_async_16(slots + stage * kStageSlots + i * kWarp, weight + static_cast<int64_t>(i * 8) * columns + column,
                    exists);
    }
  };

  WarpSums sums;
  for (int step = 0; step < P::kStages - 1; ++step) {
    if (step < my_steps) fetch(step, step);
    commit_copies();
  }
  int stage = 0, next = P::kStages - 1;
  for (int step = 0; step < my_steps; ++step) {
    const int column = step * kWarps * kStep<Weight>;
    const bool exists = first_column + column < columns;
    uint4 x_pieces[WarpSums::kPieces], pieces[2 * P::kTiles];
#pragma unroll
    for (int i = 0; i < WarpSums::kPieces; ++i) {
      x_pieces[i] = exists ? *reinterpret_cast<const uint4*>(x + x_offset[i] + column) : uint4{0, 0, 0, 0};
    }
    wait_for_copies<P::kStages - 2>();
#pragma unroll
    for (int i = 0; i < 2 * P::kTiles; ++i) pieces[i] = slots[stage * kStageSlots + i * kWarp];
    if (step + P::kStages - 1 < my_steps) fetch(step + P::kStages - 1, next);
    commit_copies();  // even if nothing is left to fetch: the wait counts groups
    sums.add(pieces, x_pieces);
    next = stage;
    stage = stage + 1 < P::kStages ? stage + 1 : 0;
  }

  Parts<kRows, kWarps, kGroups, P::kSharedBytes>::add(sums, ring, result, first_x_row, first_row);
}

struct Product {
  const char* name;
  const TensorView &x, &weight;
  int64_t variant;
  Result result;
};

template <typename Weight, int kRows, int kWarps, int kGroups>
void launch_groups(const Product& p) {
  using P = Plan<Weight, kRows, kWarps, kGroups>;
  const int64_t blocks = (p.weight.shape[0] + kRows - 1) / kRows;
  const int64_t x_tiles = (p.x.shape[0] + kGroups * kGroup - 1) / (kGroups * kGroup);
  launch({p.name, static_cast<unsigned>(blocks * x_tiles), P::kThreads, P::kSharedBytes, p.weight.stream},
         linear_kernel<Weight, kRows, kWarps, kGroups>, p.x.as<Weight>(), p.weight.as<Weight>(), p.result,
         static_cast<int>(p.weight.shape[1]));
}

template <typename Weight, int kRows, int kWarps>
void launch_variant(const Product& p) {
  if constexpr (sizeof(Weight) == 4) {
    launch_groups<Weight, kRows, kWarps, 1>(p);
  } else {
    const int64_t M = p.x.shape[0];
    if (M <= 8) return launch_groups<Weight, kRows, kWarps, 1>(p);
    if (M <= 16) return launch_groups<Weight, kRows, kWarps, 2>(p);
    if (M <= 32) return launch_groups<Weight, kRows, kWarps, 4>(p);
    launch_groups<Weight, kRows, kWarps, 8>(p);
  }
}

template <typename Weight, size_t... kPlace>
void launch_chosen(const Product& p, std::index_sequence<kPlace...>) {
  const size_t chosen = p.variant == 0 ? 0 : static_cast<size_t>(p.variant - 1);
  ((chosen == kPlace ? launch_variant<Weight, kLinearVariants[kPlace].rows, kLinearVariants[kPlace].warps>(p) : void()),
   ...);
}

void launch_any(const Product& p) {
  constexpr std::make_index_sequence<std::size(kLinearVariants)> kPlaces;
  with_float_type(p.weight.dtype, [&](auto zero) { launch_chosen<decltype(zero)>(p, kPlaces); });
}

__global__ void forget_keys_kernel(long long* keys, int rows) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) keys[row] = kLeastKey;
}

__global__ void ids_of_keys_kernel(const long long* keys, int* ids, int rows) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) ids[row] = argmax_of(keys[row]);
}

}  // namespace

void forget_keys(const LaunchConfig& each_row, long long* keys, int rows) {
  launch(each_row, forget_keys_kernel, keys, rows);
}

void ids_of_keys(const LaunchConfig& each_row, const long long* keys, int* ids, int rows) {
  launch(each_row, ids_of_keys_kernel, keys, ids, rows);
}

void run_cuda(const Linear& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0 || op.rows == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() + op.first : nullptr;
  const Result result{bias,    op.out.as<float>() + op.first, op.out.shape[1],
                      nullptr, static_cast<int>(M),           static_cast<int>(op.rows)};
  launch_any({"linear", op.x, op.weight, op.variant, result});
}

void run_cuda(const LinearArgmax& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() : nullptr;
  argmax_of_product("linear_argmax", op.keys, op.ids, [&](long long* keys) {
    const Result result{bias, nullptr, 0, keys, static_cast<int>(M), static_cast<int>(op.rows)};
    launch_any({"linear_argmax", op.x, op.weight, op.variant, result});
  });
}

}  // namespace specengine
