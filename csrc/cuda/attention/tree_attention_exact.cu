// Tree attention in float32, for float32 caches and strict mode. A block owns a tile of kPairs pairs and a split; a
// warp owns a quarter of the pairs, a lane the scores of one or two keys of a step and then some columns of the sums.
//
// A row's bits depend on its own path only, because everything is ordered by position: splits begin at fixed positions
// and are walked in units of 128 positions; a score is four chains of fused multiply-adds along the dimensions;
// weights are relative to the highest score so far, and a maximum does not depend on order; a unit's sums are one chain
// along the keys. Nodes on a path ascend, so the keys that a row sees are in the order of positions when they are in
// the order of slots. Keys and values pass through shared memory in steps, one step ahead, the unit's keys before its
// values. Floor: as the tensor-core kernel, as long as 4 * pairs * D multiply-adds per key take less time than its
// bytes.
#include "cuda/attention/merge_splits.cuh"
#include "cuda/attention/prefetch.cuh"

namespace specengine::attention {
namespace {

// For head dims up to kDim.
template <typename Cache, int kDim>
struct ExactKernel {
  static constexpr int kKeys = kDim * sizeof(Cache) < 512 ? 64 : 32;  // of a step
  static constexpr int kVector = 16 / sizeof(Cache);                  // elements per access
  // Scores of a unit: its part of the prefix, and the tree from the page in which it begins.
  __host__ __device__ static constexpr int columns(int words) {
    return kUnit + (words < kMaskWords ? words + 1 : kMaskWords) / 2 * kPage;
  }
  static int shared_bytes(int pairs, int dim, int words) {
    const size_t stages = 2 * kKeys * (dim + kVector) * sizeof(Cache);
    return static_cast<int>(stages + pairs * (dim + columns(words)) * sizeof(float));
  }
};

template <typename Cache, int kDim, int kPairs>
__global__ void __launch_bounds__(kThreads, kPairs > 8 ? 2 : 4) exact_attention_kernel(const Problem a) {
  using Kernel = ExactKernel<Cache, kDim>;
  constexpr int kKeys = Kernel::kKeys, kVector = Kernel::kVector, kLaneKeys = kKeys / kWarp;
  constexpr int kBits = kPairs * kMaskWords;
  constexpr int kRows = kPairs / kWarps;                                     // of a warp
  constexpr int kWide = kDim > 64 ? 4 : 2, kParts = kDim / (kWide * kWarp);  // columns of a lane
  SPECENGINE_DYNAMIC_SHARED(float, shared);
  SPECENGINE_SHARED(unsigned, all_bits, kBits);
  SPECENGINE_SHARED(int, all_first, kPairs);
  prefetch_and_wait(a);
  const Tile tile = find_tile<kPairs>(a, blockIdx.x);
  if (tile.b < 0) return;
  const int last_node = last_seen(a, tile, min(tile.rows - 1, (tile.first_pair + kPairs - 1) / a.group));
  const int split = blockIdx.z, begin = split_begin(split);
  const int end = min(split_begin(split + 1), tile.length + last_node + 1);
  if (begin >= end || split_begin(split + 1) <= first_seen(a, tile.length)) return;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, D = a.D;
  const int stride = D + kVector, columns = Kernel::columns(a.words);
  const int first_pair = tile.first_pair + warp * kRows;
  const bool busy = is_pair(a, tile, first_pair);
  float* const queries = shared + warp * kRows * D;
  float* const scores = shared + kPairs * D + warp * kRows * columns;
  Cache* const stages = reinterpret_cast<Cache*>(shared + kPairs * (D + columns));
  unsigned* const bits = all_bits + warp * kRows * kMaskWords;
  int* const first = all_first + warp * kRows;
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    const bool exists = is_pair(a, tile, first_pair + row);
    const float* const q = a.q + (exists ? index_of(a, tile, first_pair + row) * D : 0);
#pragma unroll
    for (int first = 0; first < kDim; first += kWarp) {
      const int d = first + lane;
      if (d < D) queries[row * D + d] = exists ? q[d] : 0;
    }
  }

  // The slots of a unit: whole steps from slots_begin on, which begins a page.
  const auto slots_begin = [&](int unit) { return min(unit, tile.length / kPage * kPage); };
  const auto steps_of = [&](int unit) {
    const int slots_end = unit + kUnit <= tile.length ? unit + kUnit : tile.length + last_node + 1;
    return (slots_end - slots_begin(unit) + kKeys - 1) / kKeys;
  };
  const auto copy_step = [&](const void* cache, int slot, Cache* stage) {
    const int64_t page = a.block_table[static_cast<int64_t>(tile.b) * a.max_pages + slot / kPage];
    const Cache* const from = static_cast<const Cache*>(cache) + ((page * a.K + blockIdx.y) * kPage + slot % kPage) * D;
    for (int key = warp; key < kKeys; key += kWarps) {
      for (int d = lane * kVector; d < D; d += kWarp * kVector) {
        copy_async_16(stage + key * stride + d, from + key * D + d, true);
      }
    }
    commit_copies();
  };

  float highest[kRows], total[kRows] = {}, sums[kRows][kParts][kWide] = {};
#pragma unroll
  for (int row = 0; row < kRows; ++row) highest[row] = kNoScore;
  const auto column_of = [&](int part) { return (part * kWarp + lane) * kWide; };

  const auto score = [&](const Cache* keys, float* to) {
    float sum[kRows][kLaneKeys][4] = {};
#pragma unroll 1
    for (int d = 0; d < D; d += kVector) {
      Pack<Cache, kVector> key[kLaneKeys];
#pragma unroll
      for (int k = 0; k < kLaneKeys; ++k) {
        key[k] = *reinterpret_cast<const Pack<Cache, kVector>*>(keys + (k * kWarp + lane) * stride + d);
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
          const auto q = *reinterpret_cast<const Pack<float, 4>*>(queries + row * D + d + i);
#pragma unroll
          for (int k = 0; k < kLaneKeys; ++k) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[row][k][j] = fmaf(q.at[j], to_float(key[k].at[i + j]), sum[row][k][j]);
          }
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int k = 0; k < kLaneKeys; ++k) {
        const float (&part)[4] = sum[row][k];
        to[row * columns + k * kWarp + lane] = (part[0] + part[1]) + (part[2] + part[3]);
      }
    }
  };
  // Turns a unit's scores, of slots `from` on, into weights; a key that a row does not see gets 0.
  const auto weigh = [&](int from, int count) {
    const auto seen = [&](int row, int c) { return sees(tile, first[row], bits + row * kMaskWords, from + c); };
    float best[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) best[row] = highest[row];
#pragma unroll 1
    for (int c = lane; c < count; c += kWarp) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (seen(row, c)) best[row] = fmaxf(best[row], scores[row * columns + c] * a.scale);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      best[row] = warp_reduce<Max>(best[row]);
      const float rescale = weight_of(highest[row], best[row]);
      highest[row] = best[row];
      total[row] = __fmul_rn(total[row], rescale);  // never fused: the kernel for small tiles has to agree
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[row][part][i] *= rescale;
      }
    }
#pragma unroll 1
    for (int c = lane; c < count; c += kWarp) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        float& x = scores[row * columns + c];
        x = seen(row, c) ? exp2f(fmaf(x, a.scale, -best[row])) : 0;
      }
    }
    __syncwarp();
  };
  const auto accumulate = [&](const Cache* values, const float* weights) {
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 4) {
      Pack<float, 4> weight[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        weight[row] = *reinterpret_cast<const Pack<float, 4>*>(weights + row * columns + key);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Pack<Cache, kWide> value[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int column = min(column_of(part), D - kWide);  // past the last one: any
          value[part] = *reinterpret_cast<const Pack<Cache, kWide>*>(values + (key + k) * stride + column);
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const float w = weight[row].at[k];
          if (w == 0) continue;  // a slot that a row does not see may hold anything
          total[row] += w;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < kWide; ++i) {
              sums[row][part][i] = fmaf(w, to_float(value[part].at[i]), sums[row][part][i]);
            }
          }
        }
      }
    }
  };

  const int first_unit = max(begin, first_seen(a, tile.length) / kUnit * kUnit);
  copy_step(a.k, slots_begin(first_unit), stages);
  for (int unit = first_unit, stage = 0; unit < end; unit += kUnit) {
    const int from = slots_begin(unit), steps = steps_of(unit);
    if ((unit == first_unit || unit + kUnit > tile.length) && lane < kRows) {
      first[lane] = find_visible(a, tile, first_pair + lane, unit, unit + kUnit, bits + lane * kMaskWords);
    }
    for (int step = 0; step < 2 * steps; ++step, stage ^= 1) {
      wait_for_copies<0>();
      __syncthreads();  // this step's copies are there, and the last step's are used up
      const Cache* const here = stages + stage * kKeys * stride;
      Cache* const there = stages + (stage ^ 1) * kKeys * stride;
      const int next = step + 1;
      const bool next_unit = next == 2 * steps;
      if (!next_unit || unit + kUnit < end) {
        const bool keys = next < steps || next_unit;
        const int slot = next_unit ? slots_begin(unit + kUnit) : from + (keys ? next : next - steps) * kKeys;
        copy_step(keys ? a.k : a.v, slot, there);
      }
      if (!busy) continue;
      if (step < steps) {
        score(here, scores + step * kKeys);
      } else {
        if (step == steps) weigh(from, steps * kKeys);
        accumulate(here, scores + (step - steps) * kKeys);
      }
    }
  }

  // The outcomes pass through the warp's shared memory, so that the code behind them is there once.
  __syncwarp();  // all lanes have read the last weights
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (column_of(part) < D) {
        Pack<float, kWide> sum;
#pragma unroll
        for (int i = 0; i < kWide; ++i) sum.at[i] = sums[row][part][i];
        *reinterpret_cast<Pack<float, kWide>*>(queries + row * D + column_of(part)) = sum;
      }
    }
    if (lane == 0) scores[row * columns] = highest[row], scores[row * columns + 1] = total[row];
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < kRows * (D / 4); i += kWarp) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    if (!is_pair(a, tile, first_pair + row)) break;
    const auto sum = *reinterpret_cast<const Pack<float, 4>*>(queries + row * D + column);
    finish_split(a, tile, first_pair + row, column, sum.at, scores[row * columns], scores[row * columns + 1]);
  }
  merge_if_last<kPairs>(a, tile, {split_of(first_seen(a, tile.length)), split_of(tile.length + last_node) + 1}, shared);
}

template <typename Cache, int kDim>
void launch_for_tile(const Problem& a, void* stream) {
  const dim3 grid(a.tiles, a.K, a.splits);
  const int bytes = ExactKernel<Cache, kDim>::shared_bytes(a.tile_pairs, a.D, a.words);
  launch({"tree_attention", grid, kThreads, with_merge(a, bytes), stream},
         a.tile_pairs == 8 ? exact_attention_kernel<Cache, kDim, 8> : exact_attention_kernel<Cache, kDim, 32>, a);
}

template <typename Cache>
void launch_for_dim(const Problem& a, void* stream) {
  if (a.D <= 64) return launch_for_tile<Cache, 64>(a, stream);
  a.D <= 128 ? launch_for_tile<Cache, 128>(a, stream) : launch_for_tile<Cache, 256>(a, stream);
}

}  // namespace

void attend_exactly(const Problem& a, DType cache, void* stream) {
  if (cache == DType::kFloat32) return launch_for_dim<float>(a, stream);
  cache == DType::kBFloat16 ? launch_for_dim<BFloat16>(a, stream) : launch_for_dim<Half>(a, stream);
}

}  // namespace specengine::attention
