// How a block of threads finds the tokens that top-k, top-p and min-p keep: radix searches over the keys of the scores,
// as in cpu/thread_sampler.h, with one histogram of the block in shared memory.
#pragma once
#include "cuda/sampling/shaped_row.cuh"

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

// A search adds up the weights of tokens, or their number, in descending order of score before the temperature; tokens
// with one key (tied) in ascending order of token.
struct Search {
  bool by_weight;
  float temperature;
  bool tied = false;
  uint32_t key = 0;

  __device__ uint64_t measure(const Row& row, float score, int v) const {
    return by_weight ? weight_of(score / temperature, row.top) : static_cast<uint64_t>(v < row.vocab);
  }
  __device__ uint32_t place(float score, int v) const { return tied ? ~static_cast<uint32_t>(v) : key_of(score); }
  __device__ bool counts(float score) const { return !tied || key_of(score) == key; }
};

// The place at which the tokens of a search reach a target.
struct Crossing {
  uint32_t key;      // of the place
  uint64_t missing;  // the target less the tokens before it
  uint64_t weight;   // of the tokens with this key
};

// A radix search in three passes. target: at least 1 and at most all; 0: the weight that top_p keeps.
__device__ inline Crossing find_crossing(const Row& row, const Bins& bins, const Search& search, uint64_t target,
                                         float top_p) {
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
      const uint32_t key = search.place(score, v);
      if ((key & known) != crossing.key || !search.counts(score)) return;
      const uint64_t w = search.measure(row, score, v);
      if (w != 0) bins.add(key >> shift & digits, w);
    });
    __syncthreads();
    // A thread sums some bins, then all bins before them.
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
    if (level == 0) crossing.missing = target > 0 ? target : enough(top_p, total);
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

// Makes the row keep what top-k, top-p and min-p leave: each of the first two the shortest list of tokens, in
// descending order of score and ascending order of token, that reaches its target. row.top: its largest score, divided
// by the temperature. Loops, so that the search is compiled once and not four times.
__device__ inline void shrink(Row& row, int top_k, float top_p, float min_p, const Bins& bins) {
  const float temperature = row.temperature;
  row.filtered = true, row.temperature = 0;  // the scores of the searches are those before the temperature
#pragma unroll 1
  for (int filter = 0; filter < 2; ++filter) {
    const bool by_weight = filter == 1;
    if (by_weight ? !(top_p < 1.0f) : !(top_k > 0 && top_k < row.vocab)) continue;
    Search search{by_weight, temperature};
    uint64_t target = by_weight ? 0 : static_cast<uint64_t>(top_k);
    uint32_t threshold = 0;
    int last = INT_MAX;
#pragma unroll 1
    while (true) {
      const Crossing at = find_crossing(row, bins, search, target, top_p);
      if (search.tied) {
        last = static_cast<int>(~at.key);
        break;
      }
      threshold = at.key;
      if (threshold == row.threshold) last = row.last;  // the tokens with this score that the other filter kept
      if (at.weight - search.measure(row, score_of(at.key), 0) < at.missing) break;
      search.tied = true, search.key = at.key, target = at.missing;  // not all of the tokens with this score
    }
    row.threshold = threshold, row.last = last;
  }
  row.temperature = temperature, row.min_p = min_p;
}

// The same for any row; a row that is no distribution keeps all tokens.
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
