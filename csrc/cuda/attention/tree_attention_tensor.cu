// Tree attention on tensor cores, for 16-bit caches. A block owns a tile of kPairs pairs and a page-aligned share of
// their slots, prefix and tree alike; it stages keys and values in shared memory, one step ahead. A warp owns 16 of the
// pairs and its part of each step's keys, with an online softmax of its own; the warps of the same pairs merge at
// the end. Keys that a pair does not see are masked, so a row's bits depend on the tree and the batch.
// Floor: every key and value from memory once per request and key/value head (tiles of the same keys share them in
// L2); expected: about 80 % of the memory's bandwidth from a few thousand cached tokens on.
#include "cuda/attention/merge_splits.cuh"
#include "cuda/attention/prefetch.cuh"

namespace specengine::attention {
namespace {

// For head dims up to kDim.
template <typename Cache, int kDim, int kPairs>
struct TensorKernel {
  static constexpr int kPairWarps = kPairs / 16, kKeyWarps = kWarps / kPairWarps;
  static constexpr int kKeys = kDim > 128 ? 32 : 64;   // of a step
  static constexpr int kWarpKeys = kKeys / kKeyWarps;  // of a warp
  static constexpr int kStride = kDim + 8;             // of a row in shared memory: odd in units of 16 bytes
  static constexpr int kStage = 2 * kKeys * kStride;   // keys, then values
  static constexpr int kShared = sizeof(Cache) * (2 * kStage + kPairs * kStride);
  static_assert(kWarpKeys % 16 == 0 && kPage % kKeys == 0);
  static_assert(sizeof(float) * kKeyWarps * kPairs * kStride <= sizeof(Cache) * 2 * kStage);
};

template <typename Cache, int kDim, int kPairs>
__global__ void __launch_bounds__(kThreads, 2) tensor_attention_kernel(const Problem a) {
  using Kernel = TensorKernel<Cache, kDim, kPairs>;
  constexpr int kKeys = Kernel::kKeys, kWarpKeys = Kernel::kWarpKeys, kStride = Kernel::kStride;
  constexpr int kKeyTiles = kWarpKeys / 8, kDimTiles = kDim / 8, kBits = kPairs * kMaskWords;
  SPECENGINE_DYNAMIC_SHARED(Cache, stages);
  SPECENGINE_SHARED(unsigned, bits, kBits);
  SPECENGINE_SHARED(int, first_slots, kPairs);
  SPECENGINE_SHARED(float2, outcomes, Kernel::kKeyWarps * kPairs);
  prefetch_and_wait(a);
  const Tile tile = find_tile<kPairs>(a, blockIdx.x);
  if (tile.b < 0) return;
  const PageShares shares = page_shares(a, tile.length, tile.nodes);
  const int slots = tile.length + tile.nodes;
  const int begin = (shares.first + static_cast<int>(blockIdx.z) * shares.each) * kPage;
  const int end = min(begin + shares.each * kPage, slots);
  if (begin >= end) return;

  // Slots that no node has written are read as zeros: they may hold NaN, which a weight of zero would pass on.
  const auto written = [&](int slot) {
    if (slot < tile.length) return true;
    const int node = slot - tile.length;
    // Nodes of earlier passes were written if their request is not idle: its first row has the root's bit.
    const int64_t row = tile.first_row + max(0, node - a.first_node);
    const int bit = node < a.first_node ? 0 : node;
    return node < tile.nodes && (a.ancestors[row * a.words + bit / 32] >> (bit % 32) & 1) != 0;
  };
  const auto copy_step = [&](int slot, Cache* stage) {
    const int64_t page = a.block_table[static_cast<int64_t>(tile.b) * a.max_pages + slot / kPage];
    const int64_t from = ((page * a.K + blockIdx.y) * kPage + slot % kPage) * a.D;
    const auto copy = [&](int i, auto is_written) {
      const int key = i / kDimTiles, column = i % kDimTiles * 8;
      const bool valid = column < a.D && is_written(slot + key);
      const int64_t at = valid ? from + key * a.D + column : 0;
      copy_async_16(stage + key * kStride + column, static_cast<const Cache*>(a.k) + at, valid);
      copy_async_16(stage + (kKeys + key) * kStride + column, static_cast<const Cache*>(a.v) + at, valid);
    };
    static_assert(kKeys * kDimTiles % kThreads == 0);
    if (slot + kKeys <= tile.length) {  // of the prefix alone: nothing to look up
#pragma unroll
      for (int i = 0; i < kKeys * kDimTiles / kThreads; ++i) {
        copy(threadIdx.x + i * kThreads, [](int) { return true; });
      }
    } else {
      for (int i = threadIdx.x; i < kKeys * kDimTiles; i += kThreads) copy(i, written);
    }
    commit_copies();
  };
  copy_step(begin, stages);

  Cache* const queries = stages + 2 * Kernel::kStage;
  constexpr int kFours = kPairs * kDim / 4 / kThreads;  // of a thread
  static_assert(kPairs * kDim / 4 % kThreads == 0);
#pragma unroll 4
  for (int i = 0; i < kFours; ++i) {
    const int four = threadIdx.x + i * kThreads, row = four / (kDim / 4), column = four % (kDim / 4) * 4;
    float4 q{0, 0, 0, 0};
    if (is_pair(a, tile, tile.first_pair + row) && column < a.D) {
      q = *reinterpret_cast<const float4*>(a.q + index_of(a, tile, tile.first_pair + row) * a.D + column);
    }
    *reinterpret_cast<uint2*>(queries + row * kStride + column) = {pack_two<Cache>(q.x, q.y),
                                                                   pack_two<Cache>(q.z, q.w)};
  }
  if (threadIdx.x < kPairs) {
    first_slots[threadIdx.x] =
        find_visible(a, tile, tile.first_pair + threadIdx.x, 0, INT_MAX, bits + threadIdx.x * kMaskWords);
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first_row = warp % Kernel::kPairWarps * 16, key_warp = warp / Kernel::kPairWarps;
  const int rows[2] = {first_row + lane / 4, first_row + lane / 4 + 8};  // of this lane's accumulators
  const int first_slot[2] = {first_slots[rows[0]], first_slots[rows[1]]};
  const bool busy = is_pair(a, tile, tile.first_pair + first_row);
  float highest[2] = {kNoScore, kNoScore}, total[2] = {0, 0};
  float sums[kDimTiles][4] = {};

  for (int slot = begin, stage = 0; slot < end; slot += kKeys, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // this step's copies are there, and the last step's are used up
    if (slot + kKeys < end) copy_step(slot + kKeys, stages + (stage ^ 1) * Kernel::kStage);
    if (!busy) continue;
    const Cache* const keys = stages + stage * Kernel::kStage + key_warp * kWarpKeys * kStride;
    const Cache* const values = keys + kKeys * kStride;

    float scores[kKeyTiles][4] = {};
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t q[4];
      load_matrices(q, queries + (first_row + lane % 16) * kStride + d + lane / 16 * 8);
#pragma unroll
      for (int key = 0; key < kWarpKeys; key += 16) {
        uint32_t k[4];
        load_matrices(k, keys + (key + lane / 16 * 8 + lane % 8) * kStride + d + lane / 8 % 2 * 8);
        multiply_add<Cache>(scores[key / 8], q, {k[0], k[1]});
        multiply_add<Cache>(scores[key / 8 + 1], q, {k[2], k[3]});
      }
    }

    const bool masked = slot + kKeys > tile.length || slot < max(first_slot[0], first_slot[1]);
    if (masked) {
#pragma unroll
      for (int keys8 = 0; keys8 < kKeyTiles; ++keys8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = slot + key_warp * kWarpKeys + keys8 * 8 + lane % 4 * 2 + i % 2;
          const bool seen = sees(tile, first_slot[i / 2], bits + rows[i / 2] * kMaskWords, key);
          scores[keys8][i] = seen ? scores[keys8][i] * a.scale : kNoScore;
        }
      }
    }
    const float scale = masked ? 1.0f : a.scale;
    float best[2] = {highest[0], highest[1]};
#pragma unroll
    for (int keys8 = 0; keys8 < kKeyTiles; ++keys8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[keys8][i] *= scale;
        best[i / 2] = fmaxf(best[i / 2], scores[keys8][i]);
      }
    }
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        best[half] = fmaxf(best[half], __shfl_xor_sync(kAllLanes, best[half], offset));
      }
      rescale[half] = weight_of(highest[half], best[half]);
      highest[half] = best[half];
      total[half] *= rescale[half];
    }
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[d][i] *= rescale[i / 2];
    }
#pragma unroll
    for (int keys8 = 0; keys8 < kKeyTiles; ++keys8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[keys8][i] = weight_of(scores[keys8][i], highest[i / 2]);
        total[i / 2] += scores[keys8][i];
      }
    }

#pragma unroll
    for (int key = 0; key < kWarpKeys; key += 16) {
      const float (&low)[4] = scores[key / 8], (&high)[4] = scores[key / 8 + 1];
      const uint32_t weights[4] = {pack_two<Cache>(low[0], low[1]), pack_two<Cache>(low[2], low[3]),
                                   pack_two<Cache>(high[0], high[1]), pack_two<Cache>(high[2], high[3])};
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        uint32_t v[4];
        load_matrices_transposed(v, values + (key + lane % 16) * kStride + d + lane / 16 * 8);
        multiply_add<Cache>(sums[d / 8], weights, {v[0], v[1]});
        multiply_add<Cache>(sums[d / 8 + 1], weights, {v[2], v[3]});
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int offset = 1; offset < 4; offset *= 2) total[half] += __shfl_xor_sync(kAllLanes, total[half], offset);
    if (lane % 4 == 0) outcomes[key_warp * kPairs + rows[half]] = float2{highest[half], total[half]};
  }
  __syncthreads();
  float* const shared_sums = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const to = shared_sums + (key_warp * kPairs + rows[half]) * kStride + d * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = float2{sums[d][2 * half], sums[d][2 * half + 1]};
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kPairs * (kDim / 4); i += kThreads) {
    const int row = i / (kDim / 4), column = i % (kDim / 4) * 4, pair = tile.first_pair + row;
    if (!is_pair(a, tile, pair) || column >= a.D) continue;
    float best = kNoScore, all = 0, sum[4] = {};
    for (int w = 0; w < Kernel::kKeyWarps; ++w) best = fmaxf(best, outcomes[w * kPairs + row].x);
    for (int w = 0; w < Kernel::kKeyWarps; ++w) {
      const float2 outcome = outcomes[w * kPairs + row];
      const float weight = weight_of(outcome.x, best);
      const float4 part = *reinterpret_cast<const float4*>(shared_sums + (w * kPairs + row) * kStride + column);
      all += weight * outcome.y;
      sum[0] += weight * part.x, sum[1] += weight * part.y, sum[2] += weight * part.z, sum[3] += weight * part.w;
    }
    finish_split(a, tile, pair, column, sum, best, all);
  }
  merge_if_last<kPairs>(a, tile, {0, (shares.end - shares.first + shares.each - 1) / shares.each}, stages);
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
  a.tile_pairs == 32 ? launch_kernel<Cache, kDim, 32>(a, stream) : launch_kernel<Cache, kDim, 64>(a, stream);
}

template <typename Cache>
void launch_for_dim(const Problem& a, void* stream) {
  if (a.D <= 64) return launch_for_tile<Cache, 64>(a, stream);
  if (a.D <= 96) return launch_for_tile<Cache, 96>(a, stream);
  a.D <= 128 ? launch_for_tile<Cache, 128>(a, stream) : launch_kernel<Cache, 256, 32>(a, stream);
}

}  // namespace

void attend_on_tensor_cores(const Problem& a, DType cache, void* stream) {
  cache == DType::kBFloat16 ? launch_for_dim<BFloat16>(a, stream) : launch_for_dim<Half>(a, stream);
}

}  // namespace specengine::attention
