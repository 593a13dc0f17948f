// Tree attention on tensor cores, for 16-bit caches. A block owns a tile of kPairs pairs and a page-aligned share of
// their slots, prefix and tree alike; it stages keys and values in shared memory, one step ahead. A warp owns 16 of the
// pairs, or 32 in wide tiles, and its part of each step's keys, with an online softmax of its own; the warps of the
// same pairs merge at the end. Keys that a pair does not see are masked, so a row's bits depend on the tree and the
// batch. Floor: every key and value from memory once per request and key/value head (tiles of the same keys share them
// in L2); expected: about 80 % of the memory's bandwidth from a few thousand cached tokens on, and for wide tiles the
// rate of shared memory (docs/design/cuda.md).
#pragma once
#include <algorithm>
#include <bit>

#include "cuda/attention/merge_splits.cuh"
#include "cuda/attention/prefetch.cuh"

namespace specengine::attention {

// For head dims up to kDim.
template <typename Cache, int kDim, int kPairs>
struct TensorKernel {
  static constexpr int kRowTiles = kPairs == kWidePairs ? 2 : 1, kWarpPairs = 16 * kRowTiles;  // of a warp
  static constexpr int kPairWarps = kPairs / kWarpPairs, kKeyWarps = kWarps / kPairWarps;
  static constexpr int kKeys = kDim > 128 ? 32 : 64;                     // of a step
  static constexpr int kWarpKeys = kKeys / kKeyWarps;                    // of a warp
  static constexpr int kPartKeys = std::min(kWarpKeys, 64 / kRowTiles);  // whose scores fit its registers
  static constexpr int kStride = kDim + 8;            // of a row in shared memory: odd in units of 16 bytes
  static constexpr int kStage = 2 * kKeys * kStride;  // keys, then values
  static constexpr int kShared = sizeof(Cache) * (2 * kStage + kPairs * kStride);
  static constexpr int kChunks = std::bit_ceil(kDim / 8u), kRowsAtOnce = kThreads / kChunks;  // of copies
  static_assert(kPartKeys % 16 == 0 && kPage % kKeys == 0);
  static_assert(sizeof(float) * kKeyWarps * kPairs * kStride <= sizeof(Cache) * 2 * kStage);
};

// A bit for each of 64 slots from `slot` on: whether a pair sees it. For `first` and `bits` see find_visible.
__device__ inline uint64_t seen_keys(const Tile& tile, int first, const unsigned* bits, int slot) {
  const auto lowest = [](int count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << max(0, count)) - 1; };
  const auto word = [&](int w) { return 0 <= w && w < kMaskWords ? uint64_t{bits[w]} : 0; };
  const int node = slot - tile.length, w = node >> 5, shift = node & 31;
  const uint64_t prefix = lowest(tile.length - slot) & ~lowest(first - slot);
  return prefix | (word(w) | word(w + 1) << 32) >> shift | (shift == 0 ? 0 : word(w + 2) << (64 - shift));
}

template <typename Cache, int kDim, int kPairs>
__global__ void __launch_bounds__(kThreads, 2) tensor_attention_kernel(const Problem a) {
  using Kernel = TensorKernel<Cache, kDim, kPairs>;
  constexpr int kKeys = Kernel::kKeys, kWarpKeys = Kernel::kWarpKeys, kStride = Kernel::kStride;
  constexpr int kPartKeys = Kernel::kPartKeys, kKeyTiles = kPartKeys / 8, kDimTiles = kDim / 8,
                kBits = kPairs * kMaskWords;
  constexpr int kRowTiles = Kernel::kRowTiles, kHalves = 2 * kRowTiles;  // of 8 rows each
  SPECENGINE_DYNAMIC_SHARED(Cache, stages);
  SPECENGINE_SHARED(unsigned, bits, kBits);
  SPECENGINE_SHARED(int, first_slots, kPairs);
  SPECENGINE_SHARED(int, indices, kPairs);  // of the pairs among all; -1: there is none
  SPECENGINE_SHARED(float2, outcomes, Kernel::kKeyWarps * kPairs);
  SPECENGINE_SHARED(Tile, kept_tile, 1);  // what only the end needs takes no registers until then
  SPECENGINE_SHARED(int, kept_splits, 1);
  prefetch_and_wait(a);
  const Tile tile = find_tile<kPairs>(a, blockIdx.x);
  if (tile.b < 0) return;
  const PageShares shares = page_shares(a, tile.length, tile.nodes);
  const int slots = tile.length + tile.nodes;
  const int begin = (shares.first + static_cast<int>(blockIdx.z) * shares.each) * kPage;
  const int end = min(begin + shares.each * kPage, slots);
  if (begin >= end) return;

  // Slots that no node has written are read as zeros: they may hold NaN, which a weight of zero would pass on.
  const auto is_written = [&](const Tile& of, int slot) {
    if (slot < of.length) return true;
    const int node = slot - of.length;
    // Nodes of earlier passes were written if their request is not idle: its first row has the root's bit.
    const int64_t row = of.first_row + max(0, node - a.first_node);
    const int bit = node < a.first_node ? 0 : node;
    return node < of.nodes && (a.ancestors[row * a.words + bit / 32] >> (bit % 32) & 1) != 0;
  };
  const int copied_key = threadIdx.x / Kernel::kChunks, column = threadIdx.x % Kernel::kChunks * 8;
  const auto copy_step = [&](const Tile& of, int slot, int64_t page, Cache* stage) {
    const int64_t from = (((page * a.K + blockIdx.y) * kPage + slot % kPage) + copied_key) * a.D + column;
    const Cache *k = static_cast<const Cache*>(a.k) + from, *v = static_cast<const Cache*>(a.v) + from;
    Cache* to = stage + copied_key * kStride + column;
    uint64_t written = ~uint64_t{0};  // a bit for each key
    if (slot + kKeys > of.length) {
      written = 0;
#pragma unroll
      for (int key = 0; key < kKeys; key += kWarp) {
        const bool mine = is_written(of, slot + key + static_cast<int>(threadIdx.x) % kWarp);
        written |= static_cast<uint64_t>(__ballot_sync(kAllLanes, mine)) << key;
      }
      written >>= copied_key;
    }
    if (column < kDim) {
      const bool in_head = column < a.D;
#pragma unroll
      for (int key = 0; key < kKeys; key += Kernel::kRowsAtOnce) {
        const bool valid = in_head && (written >> key & 1) != 0;
        copy_async_16(to + key * kStride, k, valid);
        copy_async_16(to + (kKeys + key) * kStride, v, valid);
        k += Kernel::kRowsAtOnce * a.D, v += Kernel::kRowsAtOnce * a.D;
      }
    }
    commit_copies();
  };
  const int* const pages = a.block_table + static_cast<int64_t>(tile.b) * a.max_pages;
  copy_step(tile, begin, pages[begin / kPage], stages);
  int next_page = begin + kKeys < end ? pages[(begin + kKeys) / kPage] : 0;  // known before its step is copied

  Cache* const queries = stages + 2 * Kernel::kStage;
  constexpr int kFours = kPairs * kDim / 4 / kThreads;  // of a thread
  static_assert(kPairs * kDim / 4 % kThreads == 0);
  if (threadIdx.x == 0) {
    kept_tile[0] = tile;
    kept_splits[0] = (shares.end - shares.first + shares.each - 1) / shares.each;
  }
  if (threadIdx.x < kPairs) {
    const int pair = tile.first_pair + threadIdx.x;
    indices[threadIdx.x] = is_pair(a, tile, pair) ? static_cast<int>(index_of(a, tile, pair)) : -1;
  }
  __syncthreads();
#pragma unroll 4
  for (int i = 0; i < kFours; ++i) {
    const int four = threadIdx.x + i * kThreads, row = four / (kDim / 4), column = four % (kDim / 4) * 4;
    float4 q{0, 0, 0, 0};
    if (indices[row] >= 0 && column < a.D) {
      q = *reinterpret_cast<const float4*>(a.q + static_cast<int64_t>(indices[row]) * a.D + column);
    }
    *reinterpret_cast<uint2*>(queries + row * kStride + column) = {pack_two<Cache>(q.x * a.scale, q.y * a.scale),
                                                                   pack_two<Cache>(q.z * a.scale, q.w * a.scale)};
  }
  if (threadIdx.x < kPairs) {
    first_slots[threadIdx.x] =
        find_visible(a, tile, tile.first_pair + threadIdx.x, 0, INT_MAX, bits + threadIdx.x * kMaskWords);
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first_row = warp % Kernel::kPairWarps * Kernel::kWarpPairs, key_warp = warp / Kernel::kPairWarps;
  const int lane_row = first_row + lane / 4;  // and every eighth from there on: of this lane's accumulators
  int last_first = 0;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) last_first = max(last_first, first_slots[lane_row + 8 * half]);
  float highest[kHalves], total[kHalves] = {}, sums[kRowTiles][kDimTiles][4] = {};
#pragma unroll
  for (int half = 0; half < kHalves; ++half) highest[half] = kNoScore;

  for (int slot = begin, stage = 0; slot < end; slot += kKeys, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // this step's copies are there, and the last step's are used up
    if (slot + kKeys < end) copy_step(tile, slot + kKeys, next_page, stages + (stage ^ 1) * Kernel::kStage);
    if (slot + 2 * kKeys < end) next_page = pages[(slot + 2 * kKeys) / kPage];
    if (indices[first_row] < 0) continue;
#pragma unroll 1
    for (int part = 0; part < kWarpKeys; part += kPartKeys) {
      const int first_key = slot + key_warp * kWarpKeys + part;
      const Cache* const keys = stages + stage * Kernel::kStage + (key_warp * kWarpKeys + part) * kStride;
      const Cache* const values = keys + kKeys * kStride;

      float scores[kRowTiles][kKeyTiles][4] = {};
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        uint32_t q[kRowTiles][4];
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          load_matrices(q[t], queries + (first_row + 16 * t + lane % 16) * kStride + d + lane / 16 * 8);
        }
#pragma unroll
        for (int key = 0; key < kPartKeys; key += 16) {
          uint32_t k[4];
          load_matrices(k, keys + (key + lane / 16 * 8 + lane % 8) * kStride + d + lane / 8 % 2 * 8);
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) {
            multiply_add<Cache>(scores[t][key / 8], q[t], {k[0], k[1]});
            multiply_add<Cache>(scores[t][key / 8 + 1], q[t], {k[2], k[3]});
          }
        }
      }

      const bool masked = first_key + kPartKeys > tile.length || first_key < last_first;
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        float best[2] = {highest[2 * t], highest[2 * t + 1]};
        if (masked) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = lane_row + 8 * (2 * t + half);
            const uint64_t seen =
                seen_keys(tile, first_slots[row], bits + row * kMaskWords, first_key) >> (lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 2 * kKeyTiles; ++i) {
              float& score = scores[t][i / 2][2 * half + i % 2];
              if ((seen >> (i / 2 * 8 + i % 2) & 1) == 0) score = kNoScore;
            }
          }
        }
#pragma unroll
        for (int keys8 = 0; keys8 < kKeyTiles; ++keys8) {
#pragma unroll
          for (int i = 0; i < 4; ++i) best[i / 2] = fmaxf(best[i / 2], scores[t][keys8][i]);
        }
        float rescale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int offset = 1; offset < 4; offset *= 2) {
            best[half] = fmaxf(best[half], __shfl_xor_sync(kAllLanes, best[half], offset));
          }
          rescale[half] = weight_of(highest[2 * t + half], best[half]);
          highest[2 * t + half] = best[half];
          total[2 * t + half] *= rescale[half];
        }
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[t][d][i] *= rescale[i / 2];
        }
#pragma unroll
        for (int keys8 = 0; keys8 < kKeyTiles; ++keys8) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[t][keys8][i] = weight_of(scores[t][keys8][i], highest[2 * t + i / 2]);
            total[2 * t + i / 2] += scores[t][keys8][i];
          }
        }
      }

#pragma unroll
      for (int key = 0; key < kPartKeys; key += 16) {
        uint32_t weights[kRowTiles][4];
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          const float (&low)[4] = scores[t][key / 8], (&high)[4] = scores[t][key / 8 + 1];
          weights[t][0] = pack_two<Cache>(low[0], low[1]), weights[t][1] = pack_two<Cache>(low[2], low[3]);
          weights[t][2] = pack_two<Cache>(high[0], high[1]), weights[t][3] = pack_two<Cache>(high[2], high[3]);
        }
#pragma unroll
        for (int d = 0; d < kDim; d += 16) {
          uint32_t v[4];
          load_matrices_transposed(v, values + (key + lane % 16) * kStride + d + lane / 16 * 8);
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) {
            multiply_add<Cache>(sums[t][d / 8], weights[t], {v[0], v[1]});
            multiply_add<Cache>(sums[t][d / 8 + 1], weights[t], {v[2], v[3]});
          }
        }
      }
    }
  }

#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    for (int offset = 1; offset < 4; offset *= 2) total[half] += __shfl_xor_sync(kAllLanes, total[half], offset);
    if (lane % 4 == 0) outcomes[key_warp * kPairs + lane_row + 8 * half] = float2{highest[half], total[half]};
  }
  __syncthreads();
  float* const shared_sums = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float (&sum)[4] = sums[half / 2][d];
      float* const to = shared_sums + (key_warp * kPairs + lane_row + 8 * half) * kStride + d * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = float2{sum[half % 2 * 2], sum[half % 2 * 2 + 1]};
    }
  }
  __syncthreads();
  const Tile whole = kept_tile[0];
  for (int i = threadIdx.x; i < kPairs * (kDim / 4); i += kThreads) {
    const int row = i / (kDim / 4), column = i % (kDim / 4) * 4;
    if (indices[row] < 0 || column >= a.D) continue;
    float best = kNoScore, all = 0, sum[4] = {};
    for (int w = 0; w < Kernel::kKeyWarps; ++w) best = fmaxf(best, outcomes[w * kPairs + row].x);
    for (int w = 0; w < Kernel::kKeyWarps; ++w) {
      const float2 outcome = outcomes[w * kPairs + row];
      const float weight = weight_of(outcome.x, best);
      const float4 part = *reinterpret_cast<const float4*>(shared_sums + (w * kPairs + row) * kStride + column);
      all += weight * outcome.y;
      sum[0] += weight * part.x, sum[1] += weight * part.y, sum[2] += weight * part.z, sum[3] += weight * part.w;
    }
    finish_split(a, whole, whole.first_pair + row, column, sum, best, all);
  }
  merge_if_last<kPairs>(a, whole, {0, kept_splits[0]}, stages);
}

template <typename Cache, int kDim, int kPairs>
void launch_kernel(const Problem& a, void* stream) {
  const dim3 grid(a.tiles, a.K, a.splits);
  launch({"tree_attention", grid, kThreads, with_merge(a, TensorKernel<Cache, kDim, kPairs>::kShared), stream},
         tensor_attention_kernel<Cache, kDim, kPairs>, a);
}

template <typename Cache, int kDim>
void launch_for_tile(const Problem& a, void* stream) {
  if (a.tile_pairs == 16) return launch_kernel<Cache, kDim, 16>(a, stream);
  if (a.tile_pairs == 32) return launch_kernel<Cache, kDim, 32>(a, stream);
  a.tile_pairs == 64 ? launch_kernel<Cache, kDim, 64>(a, stream) : launch_kernel<Cache, kDim, 128>(a, stream);
}

template <typename Cache>
void attend_on_tensor_cores(const Problem& a, void* stream) {
  if (a.D <= 64) return launch_for_tile<Cache, 64>(a, stream);
  if (a.D <= 96) return launch_for_tile<Cache, 96>(a, stream);
  a.D <= 128 ? launch_for_tile<Cache, 128>(a, stream) : launch_kernel<Cache, 256, 32>(a, stream);
}

}  // namespace specengine::attention
