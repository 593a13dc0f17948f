// A block owns a row of the drafter's logits and draws from it by rules/siblings.h, as the CPU does.
#include "ops/draw_siblings.h"

#include "cuda/base/arch.cuh"
#include "cuda/sampling/block_sampler.cuh"
#include "rules/siblings.h"

namespace specengine {
namespace {

struct Arguments {
  const float* logits;
  const int *requests, *nodes, *index, *tokens, *parents, *row_start;
  RequestTable table;
  int* drawn;
  float* biases;
  int* counts;
  uint64_t* weights;
  int64_t columns;
  int count;
  bool replacement, as_match, aligned;
};

__global__ void __launch_bounds__(kRuleThreads, 1) draw_siblings_kernel(Arguments op) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x, vocab = op.table.vocab;
  const int b = op.requests[row], node = op.nodes[row];
  int* drawn = op.drawn + row * op.count;
  for (int i = threadIdx.x; i < op.count; i += blockDim.x) drawn[i] = kNoToken;
  if (b < 0 || node < 0) return;
  const int first = op.row_start[b], nodes = min(op.row_start[b + 1] - first, static_cast<int>(kMaxNodes));
  if (node >= nodes || op.tokens[first] == kNoToken) return;

  const DraftedTree tree{op.tokens + first, op.parents + first, nodes, {}};
  const DenseShaping dense{op.biases + row * vocab, op.counts + row * vocab};
  uint64_t* weights = op.weights + row * vocab;
  op.table.mark(b, dense, threadIdx.x, blockDim.x);
  __syncthreads();
  BlockSampler sampler(op.table, b, tree, dense, op.aligned);
  if (sampler.load(op.logits + row * op.columns, op.index, tree, node, nullptr, {}, nullptr)) {
    draw_siblings(sampler, weights, node, op.count, op.replacement, op.as_match, drawn);
  }
  __syncthreads();
  op.table.clear(b, dense, threadIdx.x, blockDim.x);
}

}  // namespace

void run_cuda(const DrawSiblings& op) {
  const int64_t R = op.logits.shape[0], V = op.scores.shape[1], K = op.drawn.shape[1];
  if (R == 0 || K == 0) return;
  const DeviceGuard guard(op.logits.device_id);
  Arguments a{};
  a.logits = op.logits.as<float>(), a.columns = op.logits.shape[1], a.index = op.index.as<int>();
  a.requests = op.requests.as<int>(), a.nodes = op.nodes.as<int>();
  a.tokens = op.trees.tokens.as<int>(), a.parents = op.trees.parents.as<int>(),
  a.row_start = op.trees.row_start.as<int>();
  a.table = RequestTable(op.trees.sampling, op.trees.history, V);
  a.drawn = op.drawn.as<int>(), a.count = static_cast<int>(K), a.replacement = op.replacement, a.as_match = op.as_match;
  a.biases = op.scores.as<float>(), a.counts = op.counts.as<int>(), a.weights = op.weights.as<uint64_t>();
  a.aligned = V % 4 == 0 && at_16_bytes(a.logits) && at_16_bytes(a.biases) && at_16_bytes(a.counts);
  launch({"draw_siblings", dim3(static_cast<unsigned>(R)), dim3(rule_threads(V)), 0, op.logits.stream},
         draw_siblings_kernel, a);
}

}  // namespace specengine
