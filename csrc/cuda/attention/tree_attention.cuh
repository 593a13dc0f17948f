// Shared by the two attention kernels and the merge of their splits. A block owns a tile of pairs (a node of one
// request with one of the query heads that read the same key/value head), one key/value head, and one split of the
// keys. If there are several splits, a block leaves its part of each pair's softmax in the workspace, and the last one
// of the tile merges them (merge_splits.cuh).
#pragma once
#include <climits>
#include <numbers>

#include "base/tensor_view.h"
#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/kv_cache.h"

namespace specengine::attention {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPage = kPageSize;
constexpr int kMaskWords = kMaxNodes / 32;
constexpr int kWidePairs = 128;    // the largest tile on tensor cores
constexpr int kNothing = INT_MAX;  // the first position that a padding row sees
constexpr float kNoScore = -INFINITY;
constexpr float kLog2e = std::numbers::log2e_v<float>;

// All but the pointers follows from shapes, dtypes and the device.
struct Problem {
  const float* q;
  const void *k, *v;
  const int *block_table, *lengths, *row_start;
  const unsigned* ancestors;
  const float* sinks;  // [H]; none: nullptr
  void* out;
  DType out_type;
  float* parts;  // [splits][pairs][D] sums, then [splits][pairs][2] highest scores and totals
  int* arrived;  // [tiles][K] blocks that have left their parts; 0 between launches
  const char* upcoming;
  int upcoming_lines;  // of `upcoming`, that the launch brings to L2 (prefetch.cuh)
  float scale;         // times log2(e): the kernels take powers of two
  int window, B, H, K, D, words, max_pages, first_node;
  int64_t pairs;  // M * H
  bool exact;
  int tile_pairs = 0, tiles = 0;  // tiles: an upper bound
  int splits = 1;
  int group;            // H / K
  int least_pages = 1;  // of a split on tensor cores: one multiprocessor merges the sums of all splits
};

// As many elements as one access moves.
template <typename T, int count>
struct alignas(sizeof(T) * count) Pack {
  T at[count];
};

struct Tile {
  int b;  // -1: there are fewer tiles
  int first_row, rows, length;
  int nodes;       // the rows' and those before
  int first_pair;  // of the request; pair = node * group + head within the group
};

// The tile of that number, request after request; row_start is only known here. For whole warps.
template <int kPairs>
__device__ inline Tile find_tile(const Problem& a, int number) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int base = 0; base < a.B; base += kWarp) {
    const int b = base + lane;
    const int row = b < a.B ? a.row_start[b] : 0, rows = b < a.B ? a.row_start[b + 1] - row : 0;
    const int tiles = (rows * a.group + kPairs - 1) / kPairs;
    int through = tiles;  // of all requests up to this lane's
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int before = __shfl_up_sync(kAllLanes, through, offset);
      if (lane >= offset) through += before;
    }
    const unsigned owners = __ballot_sync(kAllLanes, number < through);
    if (owners != 0) {
      const int owner = __ffs(owners) - 1;
      const int first = __shfl_sync(kAllLanes, through - tiles, owner);
      const int first_row = __shfl_sync(kAllLanes, row, owner);
      const int owned = __shfl_sync(kAllLanes, rows, owner);
      return {base + owner, first_row, owned, a.lengths[base + owner], a.first_node + owned, (number - first) * kPairs};
    }
    number -= __shfl_sync(kAllLanes, through, kWarp - 1);
  }
  return {-1, 0, 0, 0, 0, 0};
}

__device__ inline bool is_pair(const Problem& a, const Tile& tile, int pair) { return pair < tile.rows * a.group; }

__device__ inline int head_of(const Problem& a, int pair) {
  return static_cast<int>(blockIdx.y) * a.group + pair % a.group;
}

// Of all rows and heads.
__device__ inline int64_t index_of(const Problem& a, const Tile& tile, int pair) {
  return static_cast<int64_t>(tile.first_row + pair / a.group) * a.H + head_of(a, pair);
}

// The first position that any row of the request sees.
__device__ inline int first_seen(const Problem& a, int length) { return max(0, length - a.window + 1); }

// The last node that rows up to `row` see: the row itself in a tree, a later one in a block whose rows see each other.
__device__ inline int last_seen(const Problem& a, const Tile& tile, int row) {
  const unsigned* bits = a.ancestors + static_cast<int64_t>(tile.first_row + row) * a.words;
  int last = a.first_node + row;
#pragma unroll
  for (int w = 0; w < kMaskWords; ++w) {
    const unsigned word = w < a.words ? bits[w] : 0;
    if (word != 0) last = max(last, 32 * w + 31 - __clz(word));
  }
  return last;
}

// The keys that a pair sees at positions [low, high): in the prefix the slots from the result on, in the tree the nodes
// in bits[kMaskWords]. Past the last pair the result is not used, and cheap.
__device__ inline int find_visible(const Problem& a, const Tile& tile, int pair, int low, int high, unsigned* bits) {
  const int row = pair / a.group;
  const unsigned* ancestors = a.ancestors + static_cast<int64_t>(tile.first_row + row) * a.words;
  int nodes = 0;
  for (int w = 0; w < kMaskWords; ++w) {
    const unsigned word = w < a.words && row < tile.rows ? ancestors[w] : 0;
    bits[w] = word;
    nodes += __popc(word);
  }
  if (nodes == 0) return row < tile.rows ? kNothing : 0;
  const int last = tile.length + nodes - 1;
  const int first = max(low, last - a.window + 1);
  if (first <= tile.length && last < high) return first;
  int position = tile.length;
#pragma unroll 1
  for (int w = 0; w < kMaskWords; ++w) {
    for (unsigned rest = bits[w]; rest != 0; rest &= rest - 1, ++position) {
      if (position < first || position >= high) bits[w] ^= rest & (~rest + 1);
    }
  }
  return first;
}

__device__ inline bool sees(const Tile& tile, int first, const unsigned* bits, int slot) {
  if (slot < tile.length) return slot >= first;
  const int node = slot - tile.length;
  return node < tile.nodes && (bits[node / 32] >> (node % 32) & 1) != 0;
}

// The pages of a request, divided among the splits.
struct PageShares {
  int first, end, each;
};

__device__ inline PageShares page_shares(const Problem& a, int length, int nodes) {
  const int first = first_seen(a, length) / kPage, end = (length + nodes + kPage - 1) / kPage;
  return {first, end, max(a.least_pages, (end - first + a.splits - 1) / a.splits)};
}

constexpr int kUnit = 128;        // positions that share one highest score
constexpr int kEqualSplits = 16;  // then their size doubles: few splits at any length, and the same at every length

// The exact kernel's: positions [split_begin(i), split_begin(i + 1)) are split i.
__host__ __device__ constexpr int split_begin(int split) {
  const int doublings = split / kEqualSplits;
  return kUnit * (((kEqualSplits + split % kEqualSplits) << doublings) - kEqualSplits);
}
__host__ __device__ constexpr int split_of(int position) {
  const int units = position / kUnit + kEqualSplits;
  int doublings = 0;
  while (units >> doublings >= 2 * kEqualSplits) ++doublings;
  return doublings * kEqualSplits + (units >> doublings) - kEqualSplits;
}

template <int count>
__device__ inline void store(const Problem& a, int64_t at, const float (&x)[count]) {
  const auto as = [&]<typename T>(T* out) {
    Pack<T, count> rounded;
#pragma unroll
    for (int i = 0; i < count; ++i) rounded.at[i] = from_float<T>(x[i]);
    *reinterpret_cast<Pack<T, count>*>(out + at) = rounded;
  };
  switch (a.out_type) {
    case DType::kBFloat16:
      return as(static_cast<BFloat16*>(a.out));
    case DType::kFloat16:
      return as(static_cast<Half*>(a.out));
    default:
      return as(static_cast<float*>(a.out));
  }
}

// 2^(score - highest), defined even before the first key.
__device__ inline float weight_of(float score, float highest) {
  return exp2f(score - (highest == kNoScore ? 0 : highest));
}

// The score of a head's sink; without one, what adds nothing to a softmax.
__device__ inline float sink_of(const Problem& a, int head) {
  return a.sinks == nullptr ? kNoScore : __fmul_rn(a.sinks[head], kLog2e);
}

// The outcome of a pair's whole softmax, from column `column` on. The sink joins here, behind all keys, so that its
// bits depend on no split; one far above all keys makes the sum infinite, and the outcome 0.
template <int count>
__device__ inline void finish(const Problem& a, int64_t index, int column, const float (&sum)[count], float highest,
                              float total, float sink) {
  const float inverse = total == 0 ? 0 : 1 / __fadd_rn(total, weight_of(sink, highest));
  float x[count];
#pragma unroll
  for (int i = 0; i < count; ++i) x[i] = sum[i] * inverse;
  store(a, index * a.D + column, x);
}

// The outcome of a split: sum over its keys of 2^(score - highest) * value, and of 2^(score - highest).
template <int count>
__device__ inline void finish_split(const Problem& a, const Tile& tile, int pair, int column, const float (&sum)[count],
                                    float highest, float total) {
  const int64_t index = index_of(a, tile, pair);
  if (a.splits == 1) return finish(a, index, column, sum, highest, total, sink_of(a, head_of(a, pair)));
  const int64_t part = blockIdx.z * a.pairs + index;
  Pack<float, count> packed;
#pragma unroll
  for (int i = 0; i < count; ++i) packed.at[i] = sum[i];
  *reinterpret_cast<Pack<float, count>*>(a.parts + part * a.D + column) = packed;
  if (column == 0) {
    float2* const scores = reinterpret_cast<float2*>(a.parts + a.splits * a.pairs * a.D);
    scores[part] = float2{highest, total};
  }
}

// The launchers of the kernels. cache: its dtype.
template <typename Cache>  // BFloat16 and Half, in a file each
void attend_on_tensor_cores(const Problem&, void* stream);
void attend_exactly(const Problem&, DType cache, void* stream);

}  // namespace specengine::attention
