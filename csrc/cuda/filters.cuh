// How a block of threads finds what top-k, top-p and min-p keep of a row: radix searches over the keys of the scores,
// as in cpu/sampling.h, with one histogram of the block in shared memory.
#pragma once
#include "cuda/sampling.cuh"

namespace specengine {

constexpr int kFilterThreads = 512;
constexpr int kBins = 2048;

// Shared memory of a search.
struct Bins {
  unsigned* low;    // [2048] sums of 64 bits in two halves: shared memory has no atomic addition of 64 bits
  unsigned* high;   // [2048]
  uint64_t* sums;   // [32]
  uint64_t* found;  // [3]

  __device__ void add(unsigned bin, uint64_t weight) const {
    const unsigned bits = static_cast<unsigned>(weight), before = atomicAdd(&low[bin], bits);
    const unsigned more = static_cast<unsigned>(weight >> 32) + (before + bits < before);
    if (more != 0) atomicAdd(&high[bin], more);
  }
  __device__ uint64_t at(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }
};

// Where a list of tokens, in descending order of their keys, reaches a weight.
struct Crossing {
  uint32_t key;
  uint64_t missing;  // what tokens with larger keys lack of that weight
  uint64_t weight;   // of the tokens with this key
};

// A radix search in three passes. target_of(weight of all) must be at least 1 and at most that.
template <typename Key, typename Weight, typename Target>
__device__ inline Crossing find_crossing(const Row& row, const Bins& bins, const Key& key_of_token,
                                         const Weight& weight, const Target& target_of) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Crossing crossing{};
  uint32_t known = 0;
#pragma unroll 1
  for (int level = 0; level < 3; ++level) {
    const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
    const uint32_t digits = level == 2 ? kBins / 2 - 1 : kBins - 1;
    for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x) bins.low[bin] = bins.high[bin] = 0;
    __syncthreads();
    row.for_each(0, row.vocab, [&](float score, int v) {
      const uint32_t key = key_of_token(score, v);
      if ((key & known) != crossing.key) return;
      const uint64_t w = weight(score, v);
      if (w != 0) bins.add(key >> shift & digits, w);
    });
    __syncthreads();
    // A thread sums some bins, then all that come before them.
    const int share = (kBins + blockDim.x - 1) / blockDim.x, first = kBins - 1 - share * threadIdx.x;
    const int last = max(first - share, -1);
    uint64_t own = 0;
    for (int bin = first; bin > last; --bin) own += bins.at(bin);
    uint64_t until = own;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint64_t more = __shfl_up_sync(kAllLanes, until, offset);
      if (lane >= offset) until += more;
    }
    if (lane == kWarp - 1) bins.sums[warp] = until;
    __syncthreads();
    uint64_t total = 0;
    for (int i = 0; i < blockDim.x / kWarp; ++i) {
      if (i == warp) until += total;
      total += bins.sums[i];
    }
    if (level == 0) crossing.missing = target_of(total);
    uint64_t before = until - own;
    if (before < crossing.missing && crossing.missing <= until) {
      for (int bin = first; bin > last; --bin) {
        const uint64_t weight_of_bin = bins.at(bin);
        if (before < crossing.missing && crossing.missing <= before + weight_of_bin) {
          bins.found[0] = bin, bins.found[1] = crossing.missing - before, bins.found[2] = weight_of_bin;
        }
        before += weight_of_bin;
      }
    }
    __syncthreads();
    crossing.key |= static_cast<uint32_t>(bins.found[0]) << shift;
    crossing.missing = bins.found[1], crossing.weight = bins.found[2];
    known |= digits << shift;
  }
  return crossing;
}

// Shrinks what the row keeps to the shortest list, in descending order of score and ascending order of token, whose
// weight reaches the target.
template <typename Weight, typename Target>
__device__ inline void keep_smallest_set(Row& row, const Bins& bins, const Weight& weight, const Target& target_of) {
  const auto by_score = [](float score, int) { return key_of(score); };
  const Crossing at = find_crossing(row, bins, by_score, weight, target_of);
  int last = at.key == row.threshold ? row.last : INT_MAX;      // what an earlier filter left of this score
  if (at.weight - weight(score_of(at.key), 0) >= at.missing) {  // not all of the tokens with this score
    const auto by_token = [](float, int v) { return ~static_cast<uint32_t>(v); };
    const auto tied = [&](float score, int v) { return key_of(score) == at.key ? weight(score, v) : 0; };
    last = static_cast<int>(~find_crossing(row, bins, by_token, tied, [&](uint64_t) { return at.missing; }).key);
  }
  row.threshold = at.key, row.last = last;
}

// Makes the row keep what top-k, top-p and min-p leave. row.top: its largest score.
__device__ inline void shrink(Row& row, int top_k, float top_p, float min_p, const Bins& bins) {
  row.filtered = true;
  if (top_k > 0 && top_k < row.vocab) {
    const auto one = [&](float, int v) { return static_cast<uint64_t>(v < row.vocab); };
    keep_smallest_set(row, bins, one, [&](uint64_t) { return static_cast<uint64_t>(top_k); });
  }
  if (top_p < 1.0f) {
    const auto weight = [&](float score, int) { return weight_of(score, row.top); };
    keep_smallest_set(row, bins, weight, [&](uint64_t total) { return enough(top_p, total); });
  }
  row.min_p = min_p;
}

// The same for any row: all of it is kept where there is no distribution.
__device__ inline void filter(Row& row, int top_k, float top_p, float min_p, const Bins& bins, float* scratch) {
  float top = -INFINITY;
  bool sane = true;
  row.for_each(0, row.vocab, [&](float score, int) { sane = sane && score < INFINITY, top = fmaxf(top, score); });
  top = block_reduce<Max>(top, scratch);
  if (__syncthreads_or(!sane) || top == -INFINITY) return;
  row.top = top;
  shrink(row, top_k, top_p, min_p, bins);
}

}  // namespace specengine
