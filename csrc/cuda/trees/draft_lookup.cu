// A block owns one request. Its threads share the positions of the history. Each compares the tokens before its
// positions with the last ones; the largest key (length of the match, then position) wins. Floor: the history once.
#include "ops/draft_lookup.h"

#include "cuda/trees/chain_rows.cuh"
#include "cuda/trees/longest_match.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    draft_lookup_kernel(const int* history, const int* history_length, const int* final_length, const int* active,
                        int capacity, int min_ngram, int max_ngram, ChainRows trees) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(unsigned long long, scratch, kWarp);
  const int b = blockIdx.x, length = history_length[b];
  const int* tokens = history + static_cast<int64_t>(b) * capacity;
  const int deepest = active[b] ? min(trees.nodes - 1, final_length[b] - length - 1) : 0;
  LongestMatch match{};
  if (deepest > 0) match = longest_match(tokens, length, min_ngram, max_ngram, scratch);
  const int drafted = match.length == 0 ? 0 : deepest;
  for (int node = threadIdx.x; node < trees.nodes; node += kThreads) {
    const int token = node == 0 ? tokens[length - 1] : node <= drafted ? match.following(tokens, length, node - 1) : -1;
    trees.write(b, node, active[b] ? token : -1);
  }
}

}  // namespace

void run_cuda(const DraftLookup& op) {
  const DeviceGuard guard(op.history.device_id);
  const int64_t B = op.history.shape[0];
  const ChainRows trees{op.tokens.as<int>(),
                        op.parents.as<int>(),
                        op.depths.as<int>(),
                        op.ancestors.as<int>(),
                        static_cast<int>(op.tokens.shape[0] / B),
                        static_cast<int>(op.ancestors.shape[1])};
  launch({"draft_lookup", dim3(static_cast<unsigned>(B)), dim3(kThreads), 0, op.history.stream}, draft_lookup_kernel,
         op.history.as<int>(), op.history_length.as<int>(), op.final_length.as<int>(), op.active.as<int>(),
         static_cast<int>(op.history.shape[1]), static_cast<int>(op.min_ngram), static_cast<int>(op.max_ngram), trees);
}

}  // namespace specengine
