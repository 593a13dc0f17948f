// A block owns one part of one level's vocabulary. It reads the part once, into shared memory, finds its best tokens
// and sums its exponentials. The last block of a request to finish merges the parts, a warp per level, and builds the
// tree.
#include "ops/expand_backbone.h"

#include <algorithm>
#include <cmath>

#include "cuda/base/arch.cuh"
#include "cuda/base/last_block.cuh"
#include "cuda/base/reduce.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPart = kVocabularyPart;
constexpr int kGroup = kPart / kWarp;                // consecutive scores of a part whose best one a lane remembers
constexpr int kLists = kMaxVocabularyParts / kWarp;  // parts that a lane merges

struct Expand {
  const float* logits;
  const int* root;
  const float* thresholds;
  const int* widths;
  int *tokens, *parents, *depths;
  float* scores;
  unsigned* ancestors;
  int *node_counts, *top_tokens;
  float *top_scores, *sums;
  int* arrived;
  int levels, vocabulary, parts, bins, nodes, words, width;  // width: the largest one
};

// A score and its token as one number that orders as they do: a larger score, then a lower token. 0 is below all.
__device__ inline uint64_t key_of(float score, int token) {
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
    const uint64_t key = i < count ? key_of(part[i], i) : 0;
    if (key < below && key > best) best = key;
  }
  return warp_max(best);
}

// One part to its `width` best tokens, in order, and the sum of exp(score - best score).
__device__ void score_part(const Expand& op, int64_t level, int part, float* scores, uint64_t* best_of,
                           float* scratch) {
  const int first = part * kPart, count = min(kPart, op.vocabulary - first), lane = threadIdx.x % kWarp;
  const float* from = op.logits + level * op.vocabulary + first;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0 && count == kPart) {
    constexpr int kFours = kPart / 4 / kThreads;
    float4 held[kFours];
#pragma unroll
    for (int j = 0; j < kFours; ++j) held[j] = reinterpret_cast<const float4*>(from)[j * kThreads + threadIdx.x];
#pragma unroll
    for (int j = 0; j < kFours; ++j) reinterpret_cast<float4*>(scores)[j * kThreads + threadIdx.x] = held[j];
  } else {
    for (int i = threadIdx.x; i < count; i += kThreads) scores[i] = from[i];
  }
  __syncthreads();
  for (int group = threadIdx.x / kWarp; group < kWarp; group += kWarps) {
    const uint64_t best = best_of_group(scores, group, count, ~uint64_t{0});
    if (lane == 0) best_of[group] = best;
  }
  __syncthreads();
  uint64_t best = best_of[lane], winner = warp_max(best);

  const float highest = score_of(winner), reference = highest == -INFINITY ? 0.0f : highest;
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += expf(scores[i] - reference);
  sum = block_reduce<Sum>(sum, scratch);  // NaN where a score is NaN or infinite

  const int64_t place = level * op.parts + part;
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

// A level once its parts are merged, as far as the tree needs it.
struct Level {
  int width, first_node;
  float score;  // cumulative, of the level's parent
};

// Merges the parts of one level, the whole warp: the level's best tokens with their log-probabilities, and its width.
// The first log-probability is NaN where the scores have no distribution: NaN or infinity among them, or all -infinite.
__device__ void merge_level(const Expand& op, int64_t level, int* tokens, float* log_probs, Level* merged) {
  const int lane = threadIdx.x % kWarp;
  const int* part_tokens = op.top_tokens + level * op.parts * op.width;
  const float* part_scores = op.top_scores + level * op.parts * op.width;
  int heads[kLists] = {};  // of the lane's parts: how many of their tokens are taken
  const auto best_head = [&] {
    uint64_t best = 0;
#pragma unroll
    for (int j = 0; j < kLists; ++j) {
      const int part = lane + j * kWarp, place = part * op.width + heads[j];
      if (part >= op.parts || heads[j] >= op.width || part_tokens[place] < 0) continue;
      const uint64_t key = key_of(part_scores[place], part_tokens[place]);
      if (key > best) best = key;
    }
    return best;
  };
  uint64_t best = best_head(), winner = warp_max(best);

  const float highest = score_of(winner);
  float total = 0;
  for (int part = lane; part < op.parts; part += kWarp) {
    total += op.sums[level * op.parts + part] * expf(part_scores[part * op.width] - highest);
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
  if (lane == 0) {
    const float confidence = expf(log_probs[0]);
    int bin = 0;
    while (bin < op.bins && confidence > op.thresholds[bin]) ++bin;
    merged->width = op.widths[bin];
  }
}

// Numbers the nodes, one thread; returns how many there are, -1 where a level has no distribution.
__device__ int number_nodes(const Expand& op, const float* log_probs, Level* levels) {
  int count = 1;
  float score = 0;
  for (int t = 0; t < op.levels; ++t) {
    levels[t].first_node = count, levels[t].score = score;
    count += levels[t].width, score += log_probs[t * op.width];
  }
  return score == score ? count : -1;
}

// One node of the tree, or padding. Nodes and levels ascend together, so the walk over the backbone above the node
// ends at its level.
__device__ void write_node(const Expand& op, int b, int node, int count, const int* tokens, const float* log_probs,
                           const Level* levels) {
  const int64_t place = static_cast<int64_t>(b) * op.nodes + node;
  const bool exists = node < count;
  int level = 0;
  for (int w = 0; w < op.words; ++w) {
    unsigned bits = exists && w == 0 ? 1u : 0u;
    if (exists && node / 32 == w) bits |= 1u << node % 32;
    while (exists && level + 1 < op.levels && levels[level + 1].first_node <= node &&
           levels[level].first_node / 32 == w) {
      bits |= 1u << levels[level++].first_node % 32;
    }
    op.ancestors[place * op.words + w] = bits;
  }
  if (!exists || node == 0) {
    op.tokens[place] = exists ? op.root[b] : -1, op.parents[place] = -1;
    op.depths[place] = exists ? 0 : -1, op.scores[place] = 0;
    return;
  }
  const int at = level * op.width + node - levels[level].first_node;
  op.tokens[place] = tokens[at], op.parents[place] = level == 0 ? 0 : levels[level - 1].first_node;
  op.depths[place] = level + 1, op.scores[place] = levels[level].score + log_probs[at];
}

__global__ void __launch_bounds__(kThreads) expand_backbone_kernel(Expand op) {
  SPECENGINE_SHARED(float4, part_scores, kPart / 4);
  SPECENGINE_SHARED(uint64_t, best_of, kWarp);
  SPECENGINE_SHARED(float, scratch, kWarp);
  SPECENGINE_SHARED(int, tokens, kMaxNodes);  // of all levels, `width` each
  SPECENGINE_SHARED(float, log_probs, kMaxNodes);
  SPECENGINE_SHARED(Level, levels, kMaxNodes);
  SPECENGINE_SHARED(int, state, 1);
  wait_for_previous_kernel();
  float* const scores = reinterpret_cast<float*>(part_scores);
  const int b = blockIdx.y, part = blockIdx.x % op.parts, level = blockIdx.x / op.parts;
  const int64_t first_level = static_cast<int64_t>(b) * op.levels;
  const bool idle = op.root[b] < 0;
  if (!idle && level < op.levels) score_part(op, first_level + level, part, scores, best_of, scratch);

  if (!is_last_to_arrive(op.arrived + b, static_cast<int>(gridDim.x))) return;

  for (int t = threadIdx.x / kWarp; t < op.levels && !idle; t += kWarps) {
    merge_level(op, first_level + t, tokens + t * op.width, log_probs + t * op.width, levels + t);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    state[0] = idle ? 0 : number_nodes(op, log_probs, levels);
    op.node_counts[b] = state[0];
  }
  __syncthreads();
  for (int node = threadIdx.x; node < op.nodes; node += kThreads) {
    write_node(op, b, node, state[0], tokens, log_probs, levels);
  }
}

}  // namespace

void run_cuda(const ExpandBackbone& op) {
  const int64_t B = op.logits.shape[0], T = op.logits.shape[1];
  if (B == 0) return;
  const DeviceGuard guard(op.logits.device_id);
  const Expand expand{op.logits.as<float>(),
                      op.root.as<int>(),
                      op.thresholds.as<float>(),
                      op.widths.as<int>(),
                      op.trees.tokens.as<int>(),
                      op.trees.parents.as<int>(),
                      op.trees.depths.as<int>(),
                      op.trees.scores.as<float>(),
                      op.trees.ancestors.as<unsigned>(),
                      op.trees.node_counts.as<int>(),
                      op.top_tokens.as<int>(),
                      op.top_scores.as<float>(),
                      op.sums.as<float>(),
                      op.arrived.as<int>(),
                      static_cast<int>(T),
                      static_cast<int>(op.logits.shape[2]),
                      static_cast<int>(op.sums.shape[2]),
                      static_cast<int>(op.thresholds.shape[0]),
                      static_cast<int>(op.trees.tokens.shape[1]),
                      static_cast<int>(op.trees.ancestors.shape[2]),
                      static_cast<int>(op.top_tokens.shape[3])};
  const dim3 grid(static_cast<unsigned>(std::max<int64_t>(1, T * expand.parts)), static_cast<unsigned>(B));
  launch({"expand_backbone", grid, kThreads, 0, op.logits.stream}, expand_backbone_kernel, expand);
}

}  // namespace specengine
