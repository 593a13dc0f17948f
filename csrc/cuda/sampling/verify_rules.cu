// Every rule but `match` on many rows; up to 512 rows are left to walk_notes.cu. A block owns a request and walks its
// tree by the functors of rules/, as the CPU does; its threads share the loops over the vocabulary. Decisions are the
// CPU's: sums are of integers, and every thread computes the same doubles. Cost per visited node: some reads of its two
// rows (from L2 after the first) and of 8 * V bytes of weights each.
#include "cuda/sampling/verify_rules.cuh"

#include "cuda/base/arch.cuh"
#include "cuda/sampling/any_rule.cuh"
#include "cuda/sampling/block_sampler.cuh"
#include "cuda/sampling/walk_notes.cuh"

namespace specengine {
namespace {

struct Arguments {
  const int *tokens, *parents, *row_start;
  RequestTable table;
  LogitRows logits;  // of all requests
  TokenMasks masks;  // of all rows
  int *path, *path_length, *bonus, *relaxed;
  float* biases;
  int* counts;
  uint64_t* weights;
  int columns;
  bool aligned;
};

// All threads write the entries behind the path's end, one thread the path.
__device__ void write(const Arguments& op, int b, const DraftedTree& tree, const Verdict& end) {
  const bool idle = end.node < 0;
  const int length = idle ? 0 : tree.depth(end.node) + 1;
  int* path = op.path + static_cast<int64_t>(b) * op.columns;
  for (int i = length + threadIdx.x; i < op.columns; i += blockDim.x) path[i] = -1;
  if (threadIdx.x != 0) return;
  for (int i = length - 1, node = end.node; i >= 0; --i, node = tree.parent(node)) path[i] = node;
  op.path_length[b] = length, op.bonus[b] = end.token, op.relaxed[b] = end.relaxed;
}

__global__ void __launch_bounds__(kRuleThreads, 1) walk_kernel(Arguments op, AnyRule rule) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(int, tokens, kMaxNodes);
  SPECENGINE_SHARED(int, parents, kMaxNodes);
  SPECENGINE_SHARED(double, values, kMaxNodes);
  SPECENGINE_SHARED(int, marks, kMaxNodes);
  SPECENGINE_SHARED(LogitRows, logits, 1);
  const int b = blockIdx.x, first = op.row_start[b], nodes = min(op.row_start[b + 1] - first, op.columns);
  const DraftedTree tree{tokens, parents, nodes, {op.masks.row(first), op.masks.words}};
  if (nodes < 1 || op.tokens[first] == kNoToken) return write(op, b, tree, {-1});

  const int64_t vocab = op.table.vocab;
  const DenseShaping dense{op.biases + b * vocab, op.counts + b * vocab};
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    tokens[node] = op.tokens[first + node], parents[node] = op.parents[first + node];
  }
  op.table.mark(b, dense, threadIdx.x, blockDim.x);
  if (threadIdx.x == 0) {
    logits[0] = op.logits;
    logits[0].target += first * vocab;
    if (op.logits.draft != nullptr) logits[0].draft_rows += first;
  }
  __syncthreads();

  BlockSampler sampler(op.table, b, tree, dense, op.aligned);
  Rows<BlockSampler> rows(tree, logits[0], sampler, op.weights + b * kWeightPlanes * vocab, values, marks);
  rule.visit([&](const auto& one) { write(op, b, tree, walk(one, rows)); });
  __syncthreads();
  op.table.clear(b, dense, threadIdx.x, blockDim.x);
}

}  // namespace

void verify_by_rule(const VerifyTree& op) {
  if (walk_with_notes(op)) return;
  const int64_t V = op.workspace.scores.shape[1];
  const bool drafted = op.draft.logits.defined();
  Arguments a{};
  a.tokens = op.trees.tokens.as<int>(), a.parents = op.trees.parents.as<int>(),
  a.row_start = op.trees.row_start.as<int>();
  a.table = RequestTable(op.trees.sampling, op.trees.history, V);
  a.logits = {op.logits.as<float>(),
              op.draft.logits.as<float>(),
              op.draft.rows.as<int>(),
              op.draft.token_index.as<int>(),
              V,
              drafted ? op.draft.logits.shape[1] : 0,
              op.draft.replacement};
  a.masks = op.masks_of(0);
  a.path = op.accepted.path.as<int>(), a.path_length = op.accepted.path_length.as<int>(),
  a.bonus = op.accepted.bonus.as<int>();
  a.relaxed = op.accepted.relaxed.as<int>();
  a.biases = op.workspace.scores.as<float>(), a.counts = op.workspace.counts.as<int>(),
  a.weights = op.workspace.weights.as<uint64_t>();
  a.columns = static_cast<int>(op.accepted.path.shape[1]);
  a.aligned = V % 4 == 0 && at_16_bytes(a.logits.target) && at_16_bytes(a.logits.draft) && at_16_bytes(a.biases) &&
              at_16_bytes(a.counts);
  const LaunchConfig config{"verify_tree", dim3(static_cast<unsigned>(op.accepted.bonus.shape[0])),
                            dim3(rule_threads(V)), 0, op.trees.tokens.stream};
  with_rule(op.rule, op.options, [&](auto rule) {
    if constexpr (!std::is_same_v<decltype(rule), Match>) launch(config, walk_kernel, a, AnyRule(rule));
  });
}

}  // namespace specengine
