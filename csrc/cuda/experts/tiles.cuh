// The tiles of a product by experts: kSize places of one expert each, as GroupPairs sorted them.
#pragma once
#include <algorithm>

#include "cuda/layer/product.cuh"

namespace specengine {

// The expert's places from the tile's first one on. expert: -1 past the last tile.
struct ExpertTile {
  int expert, first, end;
};

// Tiles that any routing has at most: grids do not depend on it, so that graphs capture them.
inline int64_t most_tiles(int64_t places, int64_t experts, int64_t size) {
  const int64_t touched = std::min(places, experts);
  return touched + (places - touched) / size;
}

// Called by whole warps, whose lanes look at an expert each; experts without places have no tile.
template <int kSize>
__device__ inline ExpertTile expert_tile(const int* starts, int experts, int number) {
  const int lane = threadIdx.x % kWarp;
  for (int first = 0; first < experts; first += kWarp) {
    const int begin = starts[min(first + lane, experts)], end = starts[min(first + lane + 1, experts)];
    const int tiles = (end - begin + kSize - 1) / kSize;
    int through = tiles;  // those of the lanes before, too
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int before = __shfl_up_sync(kAllLanes, through, offset);
      if (lane >= offset) through += before;
    }
    const unsigned reached = __ballot_sync(kAllLanes, number < through);
    if (reached != 0) {
      const int owner = __ffs(reached) - 1, place = begin + (number - (through - tiles)) * kSize;
      return {first + owner, __shfl_sync(kAllLanes, place, owner), __shfl_sync(kAllLanes, end, owner)};
    }
    number -= __shfl_sync(kAllLanes, through, kWarp - 1);
  }
  return {-1, 0, 0};
}

// Where the rows of a tile begin in x; a tile's rows past its end serve with the last one.
struct TileRows {
  const int* rows;  // of every place; null: x has the places' order
  ExpertTile tile;
  int columns;

  __device__ int64_t operator()(int i) const {
    const int place = min(tile.first + i, tile.end - 1);
    return static_cast<int64_t>(rows == nullptr ? place : rows[place]) * columns;
  }
};

// A product by experts as its kernel takes it: of expert 0 and of all places.
template <typename Op>
Result result_of(const Op& op) {
  const float* bias = op.bias.defined() ? op.bias.template as<float>() + op.first : nullptr;
  return {bias,    op.out.template as<float>() + op.first, op.out.shape[1],
          nullptr, static_cast<int>(op.out.shape[0]),      static_cast<int>(op.columns)};
}

__device__ inline Result of_tile(Result result, const ExpertTile& tile) {
  if (result.bias != nullptr) result.bias += tile.expert * result.out_columns;
  result.rows = tile.end;
  return result;
}

// Tiles of one expert are neighbours, so that memory is read once for them.
template <typename Op>
dim3 tiles_and_columns(const Op& op, int tile_places, int block_columns) {
  const int64_t experts = op.starts.shape[0] - 1;
  return {static_cast<unsigned>(most_tiles(op.out.shape[0], experts, tile_places)),
          static_cast<unsigned>((op.columns + block_columns - 1) / block_columns)};
}

}  // namespace specengine
