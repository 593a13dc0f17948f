// The best tokens of rows of logits with their log-probabilities, for kernels whose blocks own parts of a row. Each
// part is read once, into shared memory; whoever merges them sees what all blocks wrote.
#pragma once
#include <cmath>

#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/expand_backbone.h"

namespace specengine {

constexpr int kTopThreads = 256;
constexpr int kTopWarps = kTopThreads / kWarp;
constexpr int kPart = kVocabularyPart;
constexpr int kGroup = kPart / kWarp;                // consecutive scores of a part whose best one a lane remembers
constexpr int kLists = kMaxVocabularyParts / kWarp;  // parts that a lane merges

// Rows of logits [R, V] and what is known of their S parts: the `width` best of each, and the sum of its exponentials.
struct TopParts {
  const float* logits;
  const float* delta;  // [R, V], added; nullptr: nothing
  int shared;          // neighbouring rows that have the same row of logits
  int* top_tokens;     // [R, S, width]
  float* top_scores;   // [R, S, width]
  float* sums;         // [R, S]
  int vocabulary, parts, width;
};

// Of rows that share no logits. Parts: VocabularyParts.
template <typename Parts>
TopParts top_parts_of(const TensorView& logits, const Parts& parts) {
  return {logits.as<float>(),
          nullptr,
          1,
          parts.tokens.template as<int>(),
          parts.scores.template as<float>(),
          parts.sums.template as<float>(),
          static_cast<int>(logits.shape[1]),
          static_cast<int>(parts.sums.shape[1]),
          static_cast<int>(parts.tokens.shape[2])};
}

// A score and its token as one number that orders as they do: a larger score, then a lower token. 0 is below all.
__device__ inline uint64_t token_key(float score, int token) {
  const unsigned bits = __float_as_uint(score + 0.0f);  // -0 becomes 0, to which it is equal
  const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<unsigned>(token);
}
__device__ inline int token_of(uint64_t key) { return static_cast<int>(~static_cast<unsigned>(key)); }
__device__ inline float score_of(uint64_t key) {
  const unsigned ordered = static_cast<unsigned>(key >> 32);
  return __uint_as_float(ordered >> 31 ? ordered & 0x7FFFFFFFu : ~ordered);
}

__device__ inline uint64_t warp_max(uint64_t key) {
  const unsigned high = static_cast<unsigned>(key >> 32), highest = __reduce_max_sync(kAllLanes, high);
  const unsigned low = high == highest ? static_cast<unsigned>(key) : 0u;
  return static_cast<uint64_t>(highest) << 32 | __reduce_max_sync(kAllLanes, low);
}

// The highest key of a group that is lower than `below`; 0: there is none. The whole warp calls it.
__device__ inline uint64_t best_of_group(const float* part, int group, int count, uint64_t below) {
  uint64_t best = 0;
#pragma unroll
  for (int j = 0; j < kGroup / kWarp; ++j) {
    const int i = group * kGroup + j * kWarp + threadIdx.x % kWarp;
    const uint64_t key = i < count ? token_key(part[i], i) : 0;
    if (key < below && key > best) best = key;
  }
  return warp_max(best);
}

// One part of a row to its `width` best tokens, in order, and the sum of exp(score - best score). Shared: scores
// [kPart], best_of and scratch [kWarp].
__device__ inline void score_part(const TopParts& op, int64_t row, int part, float* scores, uint64_t* best_of,
                                  float* scratch) {
  const int first = part * kPart, count = min(kPart, op.vocabulary - first), lane = threadIdx.x % kWarp;
  const float* from = op.logits + row / op.shared * op.vocabulary + first;
  const float* added = op.delta == nullptr ? nullptr : op.delta + row * op.vocabulary + first;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0 && count == kPart && added == nullptr) {
    constexpr int kFours = kPart / 4 / kTopThreads;
    float4 held[kFours];
#pragma unroll
    for (int j = 0; j < kFours; ++j) held[j] = reinterpret_cast<const float4*>(from)[j * kTopThreads + threadIdx.x];
#pragma unroll
    for (int j = 0; j < kFours; ++j) reinterpret_cast<float4*>(scores)[j * kTopThreads + threadIdx.x] = held[j];
  } else {
    for (int i = threadIdx.x; i < count; i += kTopThreads) scores[i] = added == nullptr ? from[i] : from[i] + added[i];
  }
  __syncthreads();
  for (int group = threadIdx.x / kWarp; group < kWarp; group += kTopWarps) {
    const uint64_t best = best_of_group(scores, group, count, ~uint64_t{0});
    if (lane == 0) best_of[group] = best;
  }
  __syncthreads();
  uint64_t best = best_of[lane], winner = warp_max(best);

  const float highest = score_of(winner), reference = highest == -INFINITY ? 0.0f : highest;
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kTopThreads) sum += expf(scores[i] - reference);
  sum = block_reduce<Sum>(sum, scratch);  // NaN where a score is NaN or infinite

  const int64_t place = row * op.parts + part;
  if (threadIdx.x == 0) op.sums[place] = sum;
  if (threadIdx.x >= kWarp) return;
  for (int i = 0; i < op.width; ++i) {
    if (lane == 0) {
      op.top_tokens[place * op.width + i] = winner == 0 ? -1 : first + token_of(winner);
      op.top_scores[place * op.width + i] = winner == 0 ? -INFINITY : score_of(winner);
    }
    const int group = __ffs(__ballot_sync(kAllLanes, best == winner)) - 1;
    const uint64_t next = best_of_group(scores, group, count, winner);
    if (lane == group) best = next;
    winner = warp_max(best);
  }
}

// Merges the parts of a row, the whole warp: its best tokens with their log-probabilities. The first log-probability is
// NaN where the scores have no distribution: NaN or infinity among them, or all -infinite.
__device__ inline void merge_parts(const TopParts& op, int64_t row, int* tokens, float* log_probs) {
  const int lane = threadIdx.x % kWarp;
  const int* part_tokens = op.top_tokens + row * op.parts * op.width;
  const float* part_scores = op.top_scores + row * op.parts * op.width;
  int heads[kLists] = {};  // of the lane's parts: how many of their tokens are taken
  const auto best_head = [&] {
    uint64_t best = 0;
#pragma unroll
    for (int j = 0; j < kLists; ++j) {
      const int part = lane + j * kWarp, place = part * op.width + heads[j];
      if (part >= op.parts || heads[j] >= op.width || part_tokens[place] < 0) continue;
      const uint64_t key = token_key(part_scores[place], part_tokens[place]);
      if (key > best) best = key;
    }
    return best;
  };
  uint64_t best = best_head(), winner = warp_max(best);

  const float highest = score_of(winner);
  float total = 0;
  for (int part = lane; part < op.parts; part += kWarp) {
    total += op.sums[row * op.parts + part] * expf(part_scores[part * op.width] - highest);
  }
  total = warp_reduce<Sum>(total);
  const float normaliser = total > 0 ? highest + logf(total) : NAN;

  for (int i = 0; i < op.width; ++i) {
    if (lane == 0) tokens[i] = token_of(winner), log_probs[i] = score_of(winner) - normaliser;
    if (best == winner) {
#pragma unroll
      for (int j = 0; j < kLists; ++j) heads[j] += token_of(winner) / kPart == lane + j * kWarp;
      best = best_head();
    }
    winner = warp_max(best);
  }
}

}  // namespace specengine
