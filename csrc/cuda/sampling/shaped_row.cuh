// A row of logits shaped by the sampling parameters, and the draw of a block of threads from it, with the choices of
// cpu/thread_sampler.h. Every pass makes the scores anew from the logits (a row is in L2 after the first pass), so no
// copy of the row is needed. All sums are of integers: the result depends neither on the order of threads nor on the
// number of blocks that share a row.
#pragma once
#include <climits>

#include "base/exp.h"
#include "cuda/base/device.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/verify_tree.h"

namespace specengine {

constexpr int kStrip = kWarp * kNoiseBlock;  // tokens that a warp draws from at a time: one noise block per lane
constexpr int kGroups = 4 * kWarp;           // tokens that a warp reads at a time
constexpr int kPathBits = 1024;
static_assert(kGroups == 2 * kNoiseBlock);

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

// One node's row and its request's parameters, which shape it.
struct Row {
  const float* logits;        // [V], or as many columns as the index says
  const int* index;           // [V]: the column of a token, -1: none (-inf); nullptr: columns are tokens
  const float* bias;          // [V]; nullptr: none
  const int* counts;          // [V], of the history (see kSeen); nullptr: no penalties
  const uint32_t* mask;       // [ceil(V / 32)]: the tokens allowed, see base/token_mask.h; nullptr: all
  const int* path;            // tokens from the root's first child down to the node, in any order
  const unsigned* path_bits;  // bit t % 1024 is set for every token t on the path
  int depth, vocab;
  bool aligned;  // rows start at multiples of 16 bytes
  Penalties penalties;
  float temperature;
  uint64_t seed;
  uint32_t position;

  // Filters keep the keys above `threshold`, and of the tokens with that key those up to `last`. Keys are of scores
  // before the temperature, because the division may round two scores to one.
  bool filtered;
  uint32_t threshold;
  int last;
  float top, min_p;

  __device__ void keep_all() { filtered = false, threshold = 0, last = INT_MAX, top = 0, min_p = 0; }

  __device__ float4 load(int v, int end) const {
    if (index == nullptr) return load_four<float4>(logits, v, end, aligned, -INFINITY);
    return {indexed(v, end), indexed(v + 1, end), indexed(v + 2, end), indexed(v + 3, end)};
  }

  __device__ float4 scores(float4 x, int v) const { return tempered(untempered(x, v), v); }

  // Of four tokens: with biases, penalties and the mask; then with temperature and filters.
  __device__ float4 untempered(float4 x, int v) const {
    if (bias != nullptr) {
      const float4 more = load_four<float4>(bias, v, vocab, aligned, 0.0f);
      x.x += more.x, x.y += more.y, x.z += more.z, x.w += more.w;
    }
    if (counts != nullptr) {
      const int4 count = load_four<int4>(counts, v, vocab, aligned, 0);
      x.x = penalised(x.x, v, count.x), x.y = penalised(x.y, v + 1, count.y);
      x.z = penalised(x.z, v + 2, count.z), x.w = penalised(x.w, v + 3, count.w);
    }
    if (mask != nullptr) {  // four tokens from a multiple of four on lie in one word
      const uint32_t allowed = v < vocab ? mask[v / kMaskBits] >> (v % kMaskBits) : 0;
      x.x = allowed & 1 ? x.x : -INFINITY, x.y = allowed & 2 ? x.y : -INFINITY;
      x.z = allowed & 4 ? x.z : -INFINITY, x.w = allowed & 8 ? x.w : -INFINITY;
    }
    return x;
  }
  __device__ float4 tempered(float4 x, int v) const {
    if (filtered) x.x = ranked(x.x, v), x.y = ranked(x.y, v + 1), x.z = ranked(x.z, v + 2), x.w = ranked(x.w, v + 3);
    if (temperature != 0.0f && temperature != 1.0f) {
      x.x /= temperature, x.y /= temperature, x.z /= temperature, x.w /= temperature;
    }
    if (filtered && min_p != 0) x.x = likely(x.x), x.y = likely(x.y), x.z = likely(x.z), x.w = likely(x.w);
    return x;
  }

  __device__ float score(int v) const {
    const float4 x = scores(load(v / 4 * 4, vocab), v / 4 * 4);
    return v & 2 ? (v & 1 ? x.w : x.z) : (v & 1 ? x.y : x.x);
  }

  // Calls body(score, token) for all tokens of a part of the row, per thread in ascending order. The score past the end
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
  __device__ float indexed(int v, int end) const { return v < end && index[v] >= 0 ? logits[index[v]] : -INFINITY; }

  __device__ float penalised(float score, int v, int count) const {
    if (path_bits[v % kPathBits / 32] >> (v % 32) & 1) {
      for (int i = 0; i < depth; ++i) count += path[i] == v;
    }
    return count == 0 ? score : penalties.apply(score, count);
  }

  __device__ float ranked(float score, int v) const {
    const uint32_t key = key_of(score);
    return key > threshold || (key == threshold && v <= last) ? score : -INFINITY;
  }
  __device__ float likely(float score) const {
    return exp_polynomial<OneLane>(score - top) >= min_p ? score : -INFINITY;
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
  const double value = warp_reduce<Max>(mine.value);
  mine = {value, __reduce_min_sync(kAllLanes, mine.value == value ? static_cast<int>(mine.token) : INT_MAX)};
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = mine;
  __syncthreads();
  for (int i = 0; i < blockDim.x / kWarp; ++i) mine = better(mine, scratch[i]);
  __syncthreads();
  return mine;
}

// The best of a thread's noise blocks (its number as the token). A warp owns strips of 32 noise blocks; half a warp
// reads one of them at a time, and every lane adds the noise of one.
__device__ inline Candidate best_noise_block(const Row& row, int begin, int end) {
  const int lane = threadIdx.x % kWarp, half = kWarp / 2;
  Candidate best = nothing();
  bool sane = true;
  for (int strip = begin + threadIdx.x / kWarp * kStrip; strip < end; strip += blockDim.x / kWarp * kStrip) {
    float highest = -INFINITY;
    uint64_t total = 0;
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
    if (highest == -INFINITY) continue;
    const uint32_t block = strip / kNoiseBlock + 2 * (lane % half) + lane / half;
    best = better(best, {block_value(highest, total, row.seed, row.position, block), block});
  }
  return sane ? best : no_distribution();
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

// The winner among the tokens [begin, end); end is a multiple of strips or the end of the row. Every thread gets it.
__device__ inline Candidate draw(const Row& row, int begin, int end, Candidate* scratch) {
  if (row.temperature == 0.0f) return block_best(most_likely(row, begin, end), scratch);
  const Candidate block = block_best(best_noise_block(row, begin, end), scratch);
  if (block.token == kNoToken) return block;
  Candidate mine = nothing();
  const int first = static_cast<int>(block.token * kNoiseBlock);
  for (int v = first + threadIdx.x; v < first + kNoiseBlock && v < end; v += blockDim.x) {
    const float score = row.score(v);
    if (score > -INFINITY) mine = better(mine, {token_value(score, row.seed, row.position, v), v});
  }
  return {block.value, block_best(mine, scratch).token};
}

}  // namespace specengine
