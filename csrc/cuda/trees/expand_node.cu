// A block owns one part of the vocabulary of one request's row. The last block of a request to finish merges the parts
// and lets the tree grow, by one warp. Floor: 4 V per row, the logits.
#include "ops/growth/expand_node.h"

#include "cuda/base/last_block.cuh"
#include "cuda/trees/best_first.cuh"
#include "cuda/trees/top_tokens.cuh"

namespace specengine {
namespace {

struct Nodes {
  TopParts top;  // a row per request
  PathGrowth growth;
  DeepestLevel deepest;
  const int *roots, *token_ids;
  const float* confidence;
  int *child_tokens, *arrived;  // the first is [B, N, k]
  float *child_log_probs, *confidences;
  int columns, step;
};

// Begins with the root, the whole block.
__device__ void begin(const Nodes& op, PathGrowth& growth) {
  for (int column = threadIdx.x; column < op.columns; column += kTopThreads) {
    growth.tokens[column] = -1, growth.scores[column] = 0;
    growth.tree.nodes.parents[column] = -1, growth.tree.nodes.depths[column] = -1;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    growth.tree.begin();
    growth.tokens[0] = op.roots[growth.request];
  }
  growth.tree.count = 1;
  __syncthreads();
}

// Writes the children of a node to its list, the whole warp; returns whether there are any.
__device__ bool list_children(const Nodes& op, int b, int node) {
  const int lane = threadIdx.x % kWarp, k = op.top.width;
  const int64_t place = static_cast<int64_t>(b) * op.columns + node;
  int* const tokens = op.child_tokens + place * k;
  float* const log_probs = op.child_log_probs + place * k;
  merge_parts(op.top, b, tokens, log_probs);
  __syncwarp();
  const float first = log_probs[0];
  if (first == first && op.token_ids != nullptr) {
    for (int i = lane; i < k; i += kWarp) tokens[i] = op.token_ids[tokens[i]];
  }
  if (op.confidence != nullptr && lane == 0) op.confidences[place] = op.confidence[b];
  __syncwarp();
  return first == first;
}

__global__ void __launch_bounds__(kTopThreads, 4) expand_node_kernel(Nodes op) {
  SPECENGINE_SHARED(float4, room, kPart / 4);
  SPECENGINE_SHARED(uint64_t, best_of, kWarp);
  SPECENGINE_SHARED(float, scratch, kWarp);
  wait_for_previous_kernel();
  const int b = blockIdx.y, deepest = op.deepest.of(b);
  const int node = deepest == 0 ? -1 : op.step == 0 ? 0 : op.growth.opened[b];
  if (node >= 0) score_part(op.top, b, blockIdx.x, reinterpret_cast<float*>(room), best_of, scratch);

  if (!is_last_to_arrive(op.arrived + b, static_cast<int>(gridDim.x))) return;

  if (op.step > 0 && threadIdx.x >= kWarp) return;
  PathGrowth growth = of_request(op.growth, b, op.step == 0 ? 1 : op.growth.count[b], deepest, op.columns);
  if (op.step == 0) begin(op, growth);
  if (threadIdx.x >= kWarp) return;
  if (node >= 0) {
    growth.advance(op.step, node, list_children(op, b, node), OneWarp{});
  } else if (threadIdx.x == 0) {
    growth.opened[0] = -1;
    growth.write_row(-1, 0);
  }
}

}  // namespace

void run_cuda(const ExpandNode& op) {
  const int64_t B = op.known.shape[0];
  if (B == 0) return;
  const DeviceGuard guard(op.known.device_id);
  TopParts top = top_parts_of(op.level.logits, op.parts);
  top.delta = op.level.delta.as<float>();
  const Nodes nodes{top,
                    growth_of(op),
                    op.limits.deepest(op.known, op.levels),
                    op.roots.as<int>(),
                    op.token_ids.as<int>(),
                    op.level.confidence.as<float>(),
                    op.nodes.tokens.as<int>(),
                    op.parts.arrived.as<int>(),
                    op.nodes.log_probs.as<float>(),
                    op.nodes.confidences.as<float>(),
                    static_cast<int>(op.candidates.tokens.shape[1]),
                    static_cast<int>(op.step)};
  const dim3 grid(static_cast<unsigned>(top.parts), static_cast<unsigned>(B));
  launch({"expand_node", grid, kTopThreads, 0, op.known.stream}, expand_node_kernel, nodes);
}

}  // namespace specengine
