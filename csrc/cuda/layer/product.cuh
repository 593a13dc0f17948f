// What kernels of linear layers share: the sums of a warp, how the sums of a block's warps are added, and where they
// go.
//
// A block owns some rows of the weight and a tile of rows of x. Its warps take turns along the columns, and their sums
// are added at the end in the order of the warps. A row's sums therefore depend on the number of warps alone, never on
// the rows beside it.
#pragma once
#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/linear.h"

namespace specengine {

constexpr int kGroup = 8;  // rows of x that the tensor cores take at once
constexpr int kTile = 16;  // rows of the weight, likewise
constexpr int kQuad = 4;   // lanes that share a row of the weight

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
  static constexpr bool kPaired = false;
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

// Adds the warps' sums. They pass through the block's shared memory of kSharedBytes at least, as many groups at a time
// as it holds. 4 more columns than there are: the lanes of a quad write 2 rows apart, and must not meet in one bank.
template <int kRows, int kWarps, int kGroups, int kSharedBytes>
struct Parts {
  static constexpr int kPitch = kRows + 4;
  static constexpr int kGroupBytes = kWarps * kGroup * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kGroupsAtOnce = kSharedBytes >= kGroups * kGroupBytes       ? kGroups
                                       : kSharedBytes >= kGroups / 2 * kGroupBytes ? kGroups / 2
                                                                                   : kGroups / 4;
  static_assert(kGroupsAtOnce > 0 && kSharedBytes >= kGroupsAtOnce * kGroupBytes);

  // Called by all threads of the block.  result: takes each product, or (kPaired) those of a row of the weight's first
  // half and of the same row of its second half: then every other 8 of the block's rows are of the second half.
  template <typename WarpSums, typename Taker>
  __device__ static void add(const WarpSums& sums, uint4* shared, const Taker& result, int first_x_row, int first_row) {
    float* const parts = reinterpret_cast<float*>(shared);
    constexpr int kPartRows = kGroupsAtOnce * kGroup;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int first = 0; first < kGroups; first += kGroupsAtOnce) {
      __syncthreads();  // other warps still read the memory
#pragma unroll
      for (int i = 0; i < kGroupsAtOnce; ++i) {
        sums.store(first + i, parts + (warp * kPartRows + i * kGroup) * kPitch, kPitch, lane);
      }
      __syncthreads();
      const auto total_of = [&](int x_row, int row) {
        const float* part = parts + x_row * kPitch + row;
        float total = part[0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) total += part[w * kPartRows * kPitch];
        return total;
      };
      constexpr int kTaken = Taker::kPaired ? kRows / 2 : kRows;
      for (int i = threadIdx.x; i < kPartRows * kTaken; i += kWarps * kWarp) {
        const int x_row = i / kTaken, row = i % kTaken, to = first_x_row + first * kGroup + x_row;
        if constexpr (Taker::kPaired) {
          const int of_first_half = row / 8 * kTile + row % 8;
          result.take(to, first_row / 2 + row, total_of(x_row, of_first_half), total_of(x_row, of_first_half + 8));
        } else {
          result.template take < kTaken<kWarp ? kTaken : kWarp>(to, first_row + row, total_of(x_row, row));
        }
      }
    }
  }
};

// Before and after a product whose results are keys: see argmax_key.
void forget_keys(const LaunchConfig& each_row, long long* keys, int rows);
void ids_of_keys(const LaunchConfig& each_row, const long long* keys, int* ids, int rows);

// Calls product(keys) between the two, and so writes the ids of the largest entries of M rows.
template <typename Product>
void argmax_of_product(const char* name, const TensorView& keys, const TensorView& ids, const Product& product) {
  constexpr int kThreads = 128;  // a thread owns one row's key
  const int rows = static_cast<int>(ids.shape[0]);
  const LaunchConfig each_row{name, static_cast<unsigned>((rows + kThreads - 1) / kThreads), kThreads, 0, ids.stream};
  forget_keys(each_row, keys.as<long long>(), rows);
  product(keys.as<long long>());
  ids_of_keys(each_row, keys.as<long long>(), ids.as<int>(), rows);
}

}  // namespace specengine
