// A block owns one part of one level's vocabulary. It reads the part once, into shared memory, finds its best tokens
// and sums its exponentials. The last block of a request to finish merges the parts, a warp per level, and builds the
// tree.
#include "ops/expand_backbone.h"

#include <algorithm>

#include "cuda/base/last_block.cuh"
#include "cuda/trees/top_tokens.cuh"

namespace specengine {
namespace {

struct Expand {
  TopParts top;  // a row per level
  const int* root;
  const float* thresholds;
  const int* widths;
  const int* ids;  // of the target's tokens; nullptr: the same
  int *tokens, *parents, *depths;
  float* scores;
  unsigned* ancestors;
  int *node_counts, *arrived;
  int levels, bins, nodes, words;
};

// A level once its parts are merged, as far as the tree needs it.
struct Level {
  int width, first_node;
  float score;  // cumulative, of the level's parent
};

// Merges the parts of one level, the whole warp, and chooses its width.
__device__ void merge_level(const Expand& op, int64_t level, int* tokens, float* log_probs, Level* merged) {
  merge_parts(op.top, level, tokens, log_probs);
  if (threadIdx.x % kWarp != 0) return;
  const float confidence = expf(log_probs[0]);
  int bin = 0;
  while (bin < op.bins && confidence > op.thresholds[bin]) ++bin;
  merged->width = op.widths[bin];
}

// Numbers the nodes, one thread; returns how many there are, -1 where a level has no distribution.
__device__ int number_nodes(const Expand& op, const float* log_probs, Level* levels) {
  int count = 1;
  float score = 0;
  for (int t = 0; t < op.levels; ++t) {
    levels[t].first_node = count, levels[t].score = score;
    count += levels[t].width, score += log_probs[t * op.top.width];
  }
  return score == score ? count : -1;
}

// One node of the tree, or padding. Nodes and levels ascend together, so the walk over the backbone above the node
// ends at its level.
__device__ void write_node(const Expand& op, int b, int node, int count, const int* tokens, const float* log_probs,
                           const Level* levels) {
  const int64_t place = static_cast<int64_t>(b) * op.nodes + node;
  const bool exists = node < count || (node == 0 && count < 0);  // the root, even without a distribution
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
  const int at = level * op.top.width + node - levels[level].first_node;
  op.tokens[place] = op.ids == nullptr ? tokens[at] : op.ids[tokens[at]];
  op.parents[place] = level == 0 ? 0 : levels[level - 1].first_node;
  op.depths[place] = level + 1, op.scores[place] = levels[level].score + log_probs[at];
}

__global__ void __launch_bounds__(kTopThreads) expand_backbone_kernel(Expand op) {
  SPECENGINE_SHARED(float4, part_scores, kPart / 4);
  SPECENGINE_SHARED(uint64_t, best_of, kWarp);
  SPECENGINE_SHARED(float, scratch, kWarp);
  SPECENGINE_SHARED(int, tokens, kMaxNodes);  // of all levels, `width` each
  SPECENGINE_SHARED(float, log_probs, kMaxNodes);
  SPECENGINE_SHARED(Level, levels, kMaxNodes);
  SPECENGINE_SHARED(int, state, 1);
  wait_for_previous_kernel();
  float* const scores = reinterpret_cast<float*>(part_scores);
  const int b = blockIdx.y, part = blockIdx.x % op.top.parts, level = blockIdx.x / op.top.parts;
  const int64_t first_level = static_cast<int64_t>(b) * op.levels;
  const bool idle = op.root[b] < 0;
  if (!idle && level < op.levels) score_part(op.top, first_level + level, part, scores, best_of, scratch);

  if (!is_last_to_arrive(op.arrived + b, static_cast<int>(gridDim.x))) return;

  for (int t = threadIdx.x / kWarp; t < op.levels && !idle; t += kTopWarps) {
    merge_level(op, first_level + t, tokens + t * op.top.width, log_probs + t * op.top.width, levels + t);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    state[0] = idle ? 0 : number_nodes(op, log_probs, levels);
    op.node_counts[b] = state[0];
  }
  __syncthreads();
  for (int node = threadIdx.x; node < op.nodes; node += kTopThreads) {
    write_node(op, b, node, state[0], tokens, log_probs, levels);
  }
}

}  // namespace

void run_cuda(const ExpandBackbone& op) {
  const int64_t B = op.logits.shape[0], T = op.logits.shape[1];
  if (B == 0) return;
  const DeviceGuard guard(op.logits.device_id);
  const TopParts top{op.logits.as<float>(),
                     nullptr,
                     1,
                     op.top_tokens.as<int>(),
                     op.top_scores.as<float>(),
                     op.sums.as<float>(),
                     static_cast<int>(op.logits.shape[2]),
                     static_cast<int>(op.sums.shape[2]),
                     static_cast<int>(op.top_tokens.shape[3])};
  const Expand expand{top,
                      op.root.as<int>(),
                      op.thresholds.as<float>(),
                      op.widths.as<int>(),
                      op.token_ids.as<int>(),
                      op.trees.tokens.as<int>(),
                      op.trees.parents.as<int>(),
                      op.trees.depths.as<int>(),
                      op.trees.scores.as<float>(),
                      op.trees.ancestors.as<unsigned>(),
                      op.trees.node_counts.as<int>(),
                      op.arrived.as<int>(),
                      static_cast<int>(T),
                      static_cast<int>(op.thresholds.shape[0]),
                      static_cast<int>(op.trees.tokens.shape[1]),
                      static_cast<int>(op.trees.ancestors.shape[2])};
  const dim3 grid(static_cast<unsigned>(std::max<int64_t>(1, T * top.parts)), static_cast<unsigned>(B));
  launch({"expand_backbone", grid, kTopThreads, 0, op.logits.stream}, expand_backbone_kernel, expand);
}

}  // namespace specengine
