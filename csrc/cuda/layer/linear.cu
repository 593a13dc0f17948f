// Skinny GEMM: reads a weight once for up to 64 rows of x. A block owns some rows of the weight and a tile of rows of
// x; its warps take turns along the columns, 64 bytes of every row at a time, and their sums are added at the end in
// the order of the warps. A row's sums therefore depend on the number of warps alone, never on the rows beside it.
//
// A lane copies to shared memory, several steps ahead, the pieces of the weight that it will multiply itself, so the
// loop has no barrier. A piece is 16 consecutive bytes of one row: the tensor cores want other columns than these in a
// lane's registers, but the order of a sum's terms is free as long as both factors keep to it.
#include "ops/linear.h"

#include <utility>

#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"

namespace specengine {
namespace {

constexpr int kGroup = 8;         // rows of x that the tensor cores take at once
constexpr int kTile = 16;         // rows of the weight, likewise
constexpr int kQuad = 4;          // lanes that share a row of the weight
constexpr int kStepBytes = 64;    // of a row
constexpr int kRing = 48 * 1024;  // bytes of the weight on their way to a block, about

template <typename Weight>
constexpr int kPiece = sizeof(uint4) / sizeof(Weight);  // columns
template <typename Weight>
constexpr int kStep = kStepBytes / sizeof(Weight);  // columns

// A warp's sums of kTiles tiles of the weight's rows and kGroups groups of x's. Lane l holds pieces of the rows
// l / 4 + 8 * i of the weight, and of the rows x_row(i, l) of x.
template <typename Weight, int kTiles, int kGroups>
struct Sums {
  static constexpr int kPieces = kGroups;  // of x
  __device__ static int x_row(int i, int lane) { return i * kGroup + lane / kQuad; }

  __device__ void add(const uint4 (&weight)[2 * kTiles], const uint4 (&x)[kPieces]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t b[2] = {half ? x[group].z : x[group].x, half ? x[group].w : x[group].y};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 &top = weight[2 * tile], &bottom = weight[2 * tile + 1];
          const uint32_t a[4] = {half ? top.z : top.x, half ? bottom.z : bottom.x, half ? top.w : top.y,
                                 half ? bottom.w : bottom.y};
          multiply_add<Weight>(sum_[tile][group], a, b);
        }
      }
    }
  }

  // The sums of a group, as to[row of x][row of the weight].
  __device__ void store(int group, float* to, int pitch, int lane) const {
    const int row = lane / kQuad, x_row = 2 * (lane % kQuad);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float (&c)[4] = sum_[tile][group];
      float* corner = to + x_row * pitch + tile * kTile + row;
      corner[0] = c[0], corner[pitch] = c[1], corner[8] = c[2], corner[pitch + 8] = c[3];
    }
  }

 private:
  float sum_[kTiles][kGroups][4] = {};
};

// float32 has no tensor cores that keep its bits: every lane multiplies its columns by all rows of x.
template <int kTiles>
struct Sums<float, kTiles, 1> {
  static constexpr int kPieces = kGroup;
  __device__ static int x_row(int i, int) { return i; }

  __device__ void add(const uint4 (&weight)[2 * kTiles], const uint4 (&x)[kPieces]) {
#pragma unroll
    for (int row = 0; row < 2 * kTiles; ++row) {
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
        float& sum = sum_[row][m];
        sum = fmaf(__uint_as_float(weight[row].x), __uint_as_float(x[m].x), sum);
        sum = fmaf(__uint_as_float(weight[row].y), __uint_as_float(x[m].y), sum);
        sum = fmaf(__uint_as_float(weight[row].z), __uint_as_float(x[m].z), sum);
        sum = fmaf(__uint_as_float(weight[row].w), __uint_as_float(x[m].w), sum);
      }
    }
  }

  __device__ void store(int, float* to, int pitch, int lane) const {
#pragma unroll
    for (int row = 0; row < 2 * kTiles; ++row) {
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
        float sum = sum_[row][m];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (lane % kQuad == 0) to[m * pitch + row * 8 + lane / kQuad] = sum;
      }
    }
  }

 private:
  float sum_[2 * kTiles][kPieces] = {};
};

// Takes the products: stores them, or keeps each row's largest key.
struct Result {
  const float* bias;  // of the weight's first row, or null
  float* out;         // likewise, or null
  int64_t out_columns;
  long long* keys;
  int rows, columns;  // M and the weight's rows

  // Called by whole warps, whose lanes have `kWidth` consecutive columns of a row each.
  template <int kWidth>
  __device__ void take(int row, int column, float value) const {
    const bool exists = row < rows && column < columns;
    if (exists && bias != nullptr) value += bias[column];
    if (out != nullptr) {
      if (exists) out[row * out_columns + column] = value;
      return;
    }
    long long key = exists ? argmax_key(value, column) : kLeastKey;
#pragma unroll
    for (int offset = kWidth / 2; offset > 0; offset /= 2) {
      key = Max::combine(key, __shfl_xor_sync(kAllLanes, key, offset));
    }
    if (threadIdx.x % kWidth == 0 && row < rows) atomicMax(keys + row, key);
  }
};

template <typename Weight, int kRows, int kWarps, int kGroups>
struct Plan {
  static constexpr int kTiles = kRows / kTile, kThreads = kWarps * kWarp;
  static constexpr int kStageBytes = kWarps * kRows * kStepBytes;
  static constexpr int kStages = kRing / kStageBytes < 3 ? 3 : kRing / kStageBytes > 6 ? 6 : kRing / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // The sums pass through the same memory, as many groups at a time as it holds. 4 more columns than there are: the
  // lanes of a quad write 2 rows apart, and must not meet in one bank.
  static constexpr int kPitch = kRows + 4;
  static constexpr int kGroupBytes = kWarps * kGroup * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kGroupsAtOnce = kSharedBytes >= kGroups * kGroupBytes       ? kGroups
                                       : kSharedBytes >= kGroups / 2 * kGroupBytes ? kGroups / 2
                                                                                   : kGroups / 4;
  static_assert(kGroupsAtOnce > 0 && kSharedBytes >= kGroupsAtOnce * kGroupBytes);
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

  float* const parts = reinterpret_cast<float*>(ring);
  constexpr int kPartRows = P::kGroupsAtOnce * kGroup;
#pragma unroll
  for (int first = 0; first < kGroups; first += P::kGroupsAtOnce) {
    __syncthreads();  // other warps still read the memory
#pragma unroll
    for (int i = 0; i < P::kGroupsAtOnce; ++i) {
      sums.store(first + i, parts + (warp * kPartRows + i * kGroup) * P::kPitch, P::kPitch, lane);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kPartRows * kRows; i += P::kThreads) {
      const float* part = parts + i / kRows * P::kPitch + i % kRows;
      float total = part[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) total += part[w * kPartRows * P::kPitch];
      result.take <
          kRows<kWarp ? kRows : kWarp>(first_x_row + first * kGroup + i / kRows, first_row + i % kRows, total);
    }
  }
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

// A thread owns one row's key.
constexpr int kThreads = 128;

__global__ void forget_keys_kernel(long long* keys, int rows) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row < rows) keys[row] = kLeastKey;
}

__global__ void ids_of_keys_kernel(const long long* keys, int* ids, int rows) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row < rows) ids[row] = argmax_of(keys[row]);
}

}  // namespace

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
  const LaunchConfig each_row{"linear_argmax", static_cast<unsigned>((M + kThreads - 1) / kThreads), kThreads, 0,
                              op.weight.stream};
  const int rows = static_cast<int>(M);
  long long* keys = op.keys.as<long long>();
  const float* bias = op.bias.defined() ? op.bias.as<float>() : nullptr;
  launch(each_row, forget_keys_kernel, keys, rows);
  launch_any({"linear_argmax", op.x, op.weight, op.variant, {bias, nullptr, 0, keys, rows, static_cast<int>(op.rows)}});
  launch(each_row, ids_of_keys_kernel, keys, op.ids.as<int>(), rows);
}

}  // namespace specengine
