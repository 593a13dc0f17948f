// How a block of threads draws from a row of logits, with the choices of cpu/sampling.h. Scores are made from the
// logits anew in every pass (a row is in L2 after the first one), so that no copy of the row is needed. All sums are of
// integers: neither the order of threads nor the number of blocks that share a row shows in the result.
#pragma once
#include <climits>

#include "base/exp.h"
#include "cuda/device.cuh"
#include "cuda/reduce.cuh"
#include "ops/verify_tree.h"

namespace specengine {

constexpr int kDrawThreads = 512;
constexpr int kStrip = kWarp * kNoiseBlock;  // tokens that a warp draws from at a time: every lane gets one noise block
constexpr int kGroups = 4 * kWarp;           // tokens that a warp reads at a time
constexpr int kBins = 2048;
constexpr int kPathBits = 1024;
static_assert(kBins == 4 * kDrawThreads && kGroups == 2 * kNoiseBlock);

struct OneLane {
  using Float = float;
  using Int = int32_t;
  __device__ static float splat(float x) { return x; }
  __device__ static float fmadd(float a, float b, float c) { return fmaf(a, b, c); }
};
__device__ inline uint64_t weight_of(float score, float top) {
  return fixed_point(exp_polynomial<OneLane>(score - top));
}

// Four entries of a row, from a multiple of four on.
template <typename Four, typename T>
__device__ inline Four load_four(const T* row, int v, int end, bool aligned, T past_end) {
  if (aligned && v < end) return *reinterpret_cast<const Four*>(row + v);
  Four four;
  four.x = v < end ? row[v] : past_end, four.y = v + 1 < end ? row[v + 1] : past_end;
  four.z = v + 2 < end ? row[v + 2] : past_end, four.w = v + 3 < end ? row[v + 3] : past_end;
  return four;
}

// One node's row, and how its sequence's parameters shape it.
struct Row {
  const float* logits;        // [V]
  const float* bias;          // [V]; nullptr: none
  const int* counts;          // [V], of the history (see kSeen); nullptr: no penalties
  const int* path;            // tokens from the root's first child down to the node, in any order
  const unsigned* path_bits;  // bit t % 1024 is set for every token t on the path
  int depth, vocab;
  bool aligned;  // rows start at multiples of 16 bytes
  Penalties penalties;
  float temperature;
  uint64_t seed;
  uint32_t position;

  // What filters leave: keys above `threshold`, and with that key the tokens up to `last`.
  bool filtered = false;
  uint32_t threshold = 0;
  int last = INT_MAX;
  float top = 0, min_p = 0;

  __device__ float4 load(int v, int end) const { return load_four<float4>(logits, v, end, aligned, -INFINITY); }

  __device__ float4 scores(float4 x, int v) const {
    if (bias != nullptr) {
      const float4 more = load_four<float4>(bias, v, vocab, aligned, 0.0f);
      x.x += more.x, x.y += more.y, x.z += more.z, x.w += more.w;
    }
    if (counts != nullptr) {
      const int4 count = load_four<int4>(counts, v, vocab, aligned, 0);
      x.x = penalised(x.x, v, count.x), x.y = penalised(x.y, v + 1, count.y);
      x.z = penalised(x.z, v + 2, count.z), x.w = penalised(x.w, v + 3, count.w);
    }
    if (temperature != 0.0f && temperature != 1.0f) {
      x.x /= temperature, x.y /= temperature, x.z /= temperature, x.w /= temperature;
    }
    if (filtered) {
      x.x = left(x.x, v), x.y = left(x.y, v + 1), x.z = left(x.z, v + 2), x.w = left(x.w, v + 3);
    }
    return x;
  }

  // Calls body(score, token) for all tokens of a part of the row, a thread's in ascending order; the score past the end
  // is -inf.
  template <typename Body>
  __device__ void for_each(int begin, int end, const Body& body) const {
    const int step = 4 * blockDim.x;
    int v = begin + 4 * threadIdx.x;
    float4 next = load(v, end), after = load(v + step, end);
#pragma unroll 1
    for (; v < end; v += step) {
      const float4 x = scores(next, v);
      next = after, after = load(v + 2 * step, end);
      body(x.x, v), body(x.y, v + 1), body(x.z, v + 2), body(x.w, v + 3);
    }
  }

 private:
  __device__ float penalised(float score, int v, int count) const {
    if (path_bits[v % kPathBits / 32] >> (v % 32) & 1) {
      for (int i = 0; i < depth; ++i) count += path[i] == v;
    }
    return count == 0 ? score : penalties.apply(score, count);
  }

  __device__ float left(float score, int v) const {
    const uint32_t key = key_of(score);
    const bool kept = key > threshold || (key == threshold && v <= last);
    return kept && (min_p == 0 || exp_polynomial<OneLane>(score - top) >= min_p) ? score : -INFINITY;
  }
};

// {-inf, kNoToken}: nothing to draw from; {inf, kNoToken}: some score is NaN or infinite.
__device__ inline Candidate nothing() { return {-INFINITY, kNoToken}; }
__device__ inline Candidate no_distribution() { return {INFINITY, kNoToken}; }
__device__ inline Candidate better(Candidate a, Candidate b) {
  return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

// Every thread gets the best of the block. scratch: shared, kWarp entries, free again after the call.
__device__ inline Candidate block_best(Candidate mine, Candidate* scratch) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    mine =
        better(mine, {__shfl_xor_sync(kAllLanes, mine.value, offset), __shfl_xor_sync(kAllLanes, mine.token, offset)});
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = mine;
  __syncthreads();
  for (int i = 0; i < blockDim.x / kWarp; ++i) mine = better(mine, scratch[i]);
  __syncthreads();
  return mine;
}

// The best noise block among those a thread owns (its number as the token). A warp owns strips of 32 noise blocks; half
// a warp reads one of them at a time, and every lane adds the noise of one.
__device__ inline Candidate best_noise_block(const Row& row, int begin, int end) {
  const int lane = threadIdx.x % kWarp, half = kWarp / 2;
  Candidate best = nothing();
  for (int strip = begin + threadIdx.x / kWarp * kStrip; strip < end; strip += blockDim.x / kWarp * kStrip) {
    float highest = -INFINITY;
    uint64_t total = 0;
    bool sane = true;
    int v = strip + 4 * lane;
    float4 next = row.load(v, end), after = row.load(v + kGroups, end);
#pragma unroll 1
    for (int i = 0; i < half && strip + i * kGroups < end; ++i, v += kGroups) {
      const float4 x = row.scores(next, v);
      next = after, after = row.load(v + 2 * kGroups, end);
      sane = sane && x.x < INFINITY && x.y < INFINITY && x.z < INFINITY && x.w < INFINITY;
      float most = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
#pragma unroll
      for (int offset = half / 2; offset > 0; offset /= 2) {
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
      }
      const float base = most > -INFINITY ? most : 0.0f;
      uint64_t sum = weight_of(x.x, base) + weight_of(x.y, base) + weight_of(x.z, base) + weight_of(x.w, base);
#pragma unroll
      for (int offset = half / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      if (lane % half == i) highest = most, total = sum;
    }
    if (!sane) return no_distribution();
    if (highest == -INFINITY) continue;
    const uint32_t block = strip / kNoiseBlock + 2 * (lane % half) + lane / half;
    best = better(best, {block_value(highest, total, row.seed, row.position, block), block});
  }
  return best;
}

__device__ inline Candidate most_likely(const Row& row, int begin, int end) {
  float best = -INFINITY;
  int token = kNoToken;
  bool sane = true;
  row.for_each(begin, end, [&](float score, int v) {
    sane = sane && score < INFINITY;
    if (score > best) best = score, token = v;
  });
  return sane ? Candidate{best, token} : no_distribution();
}

// The winner among tokens begin to end, a multiple of strips or the end of the row; every thread gets it.
__device__ inline Candidate draw(const Row& row, int begin, int end, Candidate* scratch) {
  if (row.temperature == 0.0f) return block_best(most_likely(row, begin, end), scratch);
  const Candidate block = block_best(best_noise_block(row, begin, end), scratch);
  if (block.token == kNoToken) return block;
  Candidate mine = nothing();
  const int v = static_cast<int>(block.token * kNoiseBlock) + threadIdx.x;
  if (threadIdx.x < kNoiseBlock && v < end) {
    const float4 x = row.scores(row.load(v / 4 * 4, end), v / 4 * 4);
    const float score = v & 2 ? (v & 1 ? x.w : x.z) : (v & 1 ? x.y : x.x);
    if (score > -INFINITY) mine = {token_value(score, row.seed, row.position, v), v};
  }
  return {block.value, block_best(mine, scratch).token};
}

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
    // A thread sums four bins, then all that come before them.
    const int first = kBins - 1 - 4 * threadIdx.x;
    const uint64_t own[4] = {bins.at(first), bins.at(first - 1), bins.at(first - 2), bins.at(first - 3)};
    uint64_t until = own[0] + own[1] + own[2] + own[3];
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint64_t more = __shfl_up_sync(kAllLanes, until, offset);
      if (lane >= offset) until += more;
    }
    if (lane == kWarp - 1) bins.sums[warp] = until;
    __syncthreads();
    uint64_t total = 0;
    for (int i = 0; i < kDrawThreads / kWarp; ++i) {
      if (i == warp) until += total;
      total += bins.sums[i];
    }
    if (level == 0) crossing.missing = target_of(total);
    uint64_t before = until - own[0] - own[1] - own[2] - own[3];
    if (before < crossing.missing && crossing.missing <= until) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (before < crossing.missing && crossing.missing <= before + own[i]) {
          bins.found[0] = first - i, bins.found[1] = crossing.missing - before, bins.found[2] = own[i];
        }
        before += own[i];
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
  int last = INT_MAX;
  if (at.weight - weight(score_of(at.key), 0) >= at.missing) {  // not all of the tokens with this score
    const auto by_token = [](float, int v) { return ~static_cast<uint32_t>(v); };
    const auto tied = [&](float score, int v) { return key_of(score) == at.key ? weight(score, v) : 0; };
    last = static_cast<int>(~find_crossing(row, bins, by_token, tied, [&](uint64_t) { return at.missing; }).key);
  }
  row.threshold = at.key, row.last = last;
}

// Makes the row keep what top-k, top-p and min-p leave; false where there is no distribution.
__device__ inline bool filter(Row& row, int top_k, float top_p, float min_p, const Bins& bins, float* scratch) {
  float top = -INFINITY;
  bool sane = true;
  row.for_each(0, row.vocab, [&](float score, int) { sane = sane && score < INFINITY, top = fmaxf(top, score); });
  top = block_reduce<Max>(top, scratch);
  if (__syncthreads_or(!sane) || top == -INFINITY) return false;
  row.top = top, row.filtered = true;
  if (top_k > 0 && top_k < row.vocab) {
    const auto one = [&](float, int v) { return static_cast<uint64_t>(v < row.vocab); };
    keep_smallest_set(row, bins, one, [&](uint64_t) { return static_cast<uint64_t>(top_k); });
  }
  if (top_p < 1.0f) {
    const auto weight = [&](float score, int) { return weight_of(score, top); };
    keep_smallest_set(row, bins, weight, [&](uint64_t total) { return enough(top_p, total); });
  }
  row.min_p = min_p;
  return true;
}

}  // namespace specengine
