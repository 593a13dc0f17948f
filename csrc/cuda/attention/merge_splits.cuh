// The merge of a tile's splits, by the block that finishes last: no launch of its own, and no block waits for another.
//
// A thread owns four columns of a pair at a time. Copies that it alone reads bring them to shared memory, four chunks
// of four splits ahead: a multiprocessor gets 64 bytes a clock from L2 only while about 32 KiB are under way, and
// registers for as much would cost the kernels blocks.
#pragma once
#include <algorithm>

#include "cuda/attention/tree_attention.cuh"
#include "cuda/base/last_block.cuh"

namespace specengine::attention {

constexpr int kChunk = 4, kChunksAhead = 4;

struct SplitRange {
  int first, end;
};

// Dynamic shared bytes of a kernel that needs `bytes` before the merge.
inline size_t with_merge(const Problem& a, int bytes) {
  const size_t ring = sizeof(float4) * kChunksAhead * kChunk * kThreads;
  return std::max<size_t>(bytes, a.splits == 1 ? 0 : ring + sizeof(float2) * a.tile_pairs * a.splits);
}

// The splits in which a pair sees keys, of those of its tile; none for padding.
__device__ inline SplitRange splits_of(const Problem& a, const Tile& tile, int pair, SplitRange of_tile) {
  const int row = pair / a.group, words = row < tile.rows ? min(a.words, kMaskWords) : 0;
  int nodes = 0;
  for (int w = 0; w < words; ++w) {
    nodes += __popc(a.ancestors[static_cast<int64_t>(tile.first_row + row) * a.words + w]);
  }
  if (nodes == 0) return {0, 0};
  if (!a.exact) return of_tile;
  const int last = tile.length + nodes - 1;
  return {split_of(max(0, last - a.window + 1)), split_of(last) + 1};
}

// For whole blocks. shared: the dynamic shared memory, which nobody reads any more.
template <int kPairs>
__device__ inline void merge_splits(const Problem& a, const Tile& tile, SplitRange of_tile, void* shared) {
  SPECENGINE_SHARED(SplitRange, ranges, kPairs);
  SPECENGINE_SHARED(float, highest, kPairs);
  static_assert(kPairs <= kThreads);
  float4* const ring = static_cast<float4*>(shared) + threadIdx.x;
  float2* const outcomes = static_cast<float2*>(shared) + 2 * kChunksAhead * kChunk * kThreads;  // [splits][kPairs]
  const int fours = a.D / 4, pairs = min(kPairs, tile.rows * a.group - tile.first_pair), all = pairs * fours;

  int next = threadIdx.x, next_split = of_tile.first;
  const float* from = nullptr;
  const auto copy_next = [&](int chunk) {
    if (next < all) {
      if (next_split == of_tile.first) {
        const int64_t index = index_of(a, tile, tile.first_pair + next / fours);
        from = a.parts + (next_split * a.pairs + index) * a.D + next % fours * 4;
      }
#pragma unroll
      for (int s = 0; s < kChunk; ++s, ++next_split, from += a.pairs * a.D) {
        if (next_split < of_tile.end) copy_async_16(ring + (chunk * kChunk + s) * kThreads, from, true);
      }
      if (next_split >= of_tile.end) next += kThreads, next_split = of_tile.first;
    }
    commit_copies();
  };
#pragma unroll 1
  for (int chunk = 0; chunk < kChunksAhead; ++chunk) copy_next(chunk);

  const float2* const parts = reinterpret_cast<const float2*>(a.parts + a.splits * a.pairs * a.D);
#pragma unroll 4
  for (int i = threadIdx.x; i < (of_tile.end - of_tile.first) * kPairs; i += kThreads) {
    const int split = of_tile.first + i / kPairs, pair = i % kPairs;
    if (pair < pairs) outcomes[i] = parts[split * a.pairs + index_of(a, tile, tile.first_pair + pair)];
  }
  const int own = threadIdx.x;
  if (own < pairs) ranges[own] = splits_of(a, tile, tile.first_pair + own, of_tile);
  __syncthreads();
  if (own < pairs) {
    float best = kNoScore;
    for (int split = ranges[own].first; split < ranges[own].end; ++split) {
      best = fmaxf(best, outcomes[(split - of_tile.first) * kPairs + own].x);
    }
    highest[own] = best;
  }
  __syncthreads();

  int chunk = 0;
#pragma unroll 1
  for (int four = threadIdx.x; four < all; four += kThreads) {
    const int row = four / fours, column = four % fours * 4, pair = tile.first_pair + row;
    const SplitRange range = ranges[row];
    const float best = highest[row];
    float total = 0, sum[4] = {};
#pragma unroll 1
    for (int begin = of_tile.first; begin < of_tile.end; begin += kChunk) {
      wait_for_copies<kChunksAhead - 1>();
      float4 part[kChunk];
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        if (begin + s < of_tile.end) part[s] = ring[(chunk * kChunk + s) * kThreads];
      }
      copy_next(chunk);
      chunk = (chunk + 1) % kChunksAhead;
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        if (begin + s < range.first || begin + s >= range.end) continue;
        const float2 outcome = outcomes[(begin + s - of_tile.first) * kPairs + row];
        const float weight = weight_of(outcome.x, best);
        total = fmaf(weight, outcome.y, total);
        sum[0] = fmaf(weight, part[s].x, sum[0]), sum[1] = fmaf(weight, part[s].y, sum[1]);
        sum[2] = fmaf(weight, part[s].z, sum[2]), sum[3] = fmaf(weight, part[s].w, sum[3]);
      }
    }
    finish(a, index_of(a, tile, pair), column, sum, best, total, sink_of(a, head_of(a, pair)));
  }
}

// The last statement of both kernels, for whole blocks: of the blocks whose splits have keys of the tile the last one
// merges them. of_tile: these splits; other blocks must not call this.
template <int kPairs>
__device__ inline void merge_if_last(const Problem& a, const Tile& tile, SplitRange of_tile, void* shared) {
  if (a.splits == 1) return;
  int* const counter = a.arrived + static_cast<int64_t>(blockIdx.x) * a.K + blockIdx.y;
  if (is_last_to_arrive(counter, of_tile.end - of_tile.first)) merge_splits<kPairs>(a, tile, of_tile, shared);
}

}  // namespace specengine::attention
