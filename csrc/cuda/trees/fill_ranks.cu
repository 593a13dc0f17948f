// A thread owns a candidate and walks to the root, then adds up from there. Floor: 16 bytes per candidate.
#include "ops/growth/fill_ranks.h"

#include "cuda/base/arch.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

struct Fill {
  const int* best_tokens;
  const float* best_scores;
  const int *token_ids, *ranks, *tree_parents, *tree_depths, *history, *history_length;
  int *tokens, *parents, *depths;
  float* scores;
  int ids, columns, candidates, levels, batch, capacity;
  bool by_request;
};

// Where the child is that node n is.
__device__ inline int64_t place_of(const Fill& op, int b, int n) {
  const int level = min(max(op.tree_depths[n] - 1, 0), op.levels - 1);
  const int64_t row =
      op.by_request ? static_cast<int64_t>(b) * op.levels + level : static_cast<int64_t>(level) * op.batch + b;
  return row * op.columns + 1 + min(max(op.ranks[n], 0), op.columns - 2);
}

__global__ void __launch_bounds__(kThreads) fill_ranks_kernel(Fill op) {
  wait_for_previous_kernel();
  const int b = blockIdx.x, i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= op.candidates) return;
  const int64_t column = static_cast<int64_t>(b) * op.candidates + i;
  if (i == 0) {
    const int64_t last = max(op.history_length[b] - 1, 0);
    op.tokens[column] = op.history[static_cast<int64_t>(b) * op.capacity + last], op.parents[column] = -1,
    op.depths[column] = 0, op.scores[column] = 0.0f;
    return;
  }
  float score = 0;
  for (int height = op.tree_depths[i - 1] - 1; height >= 0; --height) {  // the root's child first
    int node = i;
    for (int up = 0; up < height && node > 0; ++up) node = op.tree_parents[node - 1];
    if (node > 0) score += op.best_scores[place_of(op, b, node - 1)];
  }
  const int best = op.best_tokens[place_of(op, b, i - 1)];
  const int token = best < 0 || op.token_ids == nullptr ? best : best < op.ids ? op.token_ids[best] : -1;
  op.tokens[column] = token, op.parents[column] = op.tree_parents[i - 1];
  op.depths[column] = token < 0 ? -1 : op.tree_depths[i - 1], op.scores[column] = score;
}

}  // namespace

void run_cuda(const FillRanks& op) {
  const int64_t B = op.history.shape[0], candidates = op.candidates.tokens.shape[1];
  if (B == 0) return;
  const DeviceGuard guard(op.history.device_id);
  const Fill fill{op.best_tokens.as<int>(),
                  op.best_scores.as<float>(),
                  op.token_ids.as<int>(),
                  op.ranks.as<int>(),
                  op.parents.as<int>(),
                  op.depths.as<int>(),
                  op.history.as<int>(),
                  op.history_length.as<int>(),
                  op.candidates.tokens.as<int>(),
                  op.candidates.parents.as<int>(),
                  op.candidates.depths.as<int>(),
                  op.candidates.scores.as<float>(),
                  op.token_ids.given() ? static_cast<int>(op.token_ids.shape[0]) : 0,
                  static_cast<int>(op.best_tokens.shape[1]),
                  static_cast<int>(candidates),
                  static_cast<int>(op.levels),
                  static_cast<int>(B),
                  static_cast<int>(op.history.shape[1]),
                  op.by_request};
  const dim3 grid(static_cast<unsigned>(B), static_cast<unsigned>((candidates + kThreads - 1) / kThreads));
  launch({"fill_ranks", grid, dim3(kThreads), 0, op.history.stream}, fill_ranks_kernel, fill);
}

}  // namespace specengine
