// The op verify_tree on CUDA: run_cuda sends other rules to verify_rules.cu. This file has the kernels of rule `match`.
// Four launches:
//
// mark: A few blocks own a request: they make its counts and biases dense in the workspaces.
//
// filter: A block owns a row with top-k, top-p or min-p and finds which of its tokens they keep.
//
// draw: A block owns a slice of a row. It draws the target's token at EVERY node, so that no row waits for another's
// choice. The noise has two levels, as on the CPU (base/draw_arithmetic.h over base/philox.h): the first is keyed
// (seed, position, block of 64 tokens), the second (seed, position, token).
//
// finish: A thread owns a node: it merges the slices, and Match::step (rules/match.h) decides which child to follow.
// One thread follows these decisions from the root. The workspaces become zero again.
//
// Floor: the logits once, 4 * M * V bytes; masks add a bit per logit. Filters read their rows up to seven times more
// (from L2), by one block each; penalties and biases add 4 bytes each per token for the requests that have them.
#include "ops/verify_tree.h"

#include <algorithm>

#include "cuda/base/arch.cuh"
#include "cuda/sampling/filters.cuh"
#include "cuda/sampling/tree_rows.cuh"
#include "cuda/sampling/verify_rules.cuh"
#include "rules/match.h"

namespace specengine {
namespace {

constexpr int kThreads = static_cast<int>(kMaxNodes), kDrawThreads = 256;
static_assert(kDrawThreads >= kMaxNodes && kFilterThreads >= kMaxNodes, "a thread reads one node above a row");

struct Arguments : TreeRows {
  const float* logits;
  int *path, *path_length, *bonus, *relaxed;
  RowState* row_states;

  __device__ Row row(int b) const {
    Row row = row_of(*this, b);
    row.logits = logits + static_cast<int64_t>(blockIdx.x) * row.vocab, row.mask = masks.row(blockIdx.x);
    return row;
  }
};

__global__ void __launch_bounds__(kThreads) mark_kernel(Arguments op) {
  wait_for_previous_kernel();
  op.mark();
}

__global__ void __launch_bounds__(kFilterThreads, 1) filter_kernel(Arguments op) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(unsigned, low, kBins);
  SPECENGINE_SHARED(unsigned, high, kBins);
  SPECENGINE_SHARED(uint64_t, sums, kWarp);
  SPECENGINE_SHARED(uint64_t, found, 3);
  SPECENGINE_SHARED(float, maxima, kWarp);
  const int b = request_of_row(op);
  if (b < 0 || !op.table.filters(b)) return;
  Row row = op.row(b);
  filter(row, op.table.top_k[b], op.table.top_p[b], op.table.min_p[b], {low, high, sums, found}, maxima);
  if (threadIdx.x != 0) return;
  RowState& state = op.row_states[blockIdx.x];
  state.threshold = row.threshold, state.last = row.last, state.top = row.top, state.min_p = row.min_p;
}

__device__ void draw_slice(const Arguments& op) {
  SPECENGINE_SHARED(Candidate, best, kWarp);
  const int b = request_of_row(op);
  if (b < 0) return;
  Row row = op.row(b);
  RowState& state = op.row_states[blockIdx.x];
  if (op.table.filters(b)) {
    row.filtered = true;
    row.threshold = state.threshold, row.last = state.last, row.top = state.top, row.min_p = state.min_p;
  }
  const Part part = part_of(row);
  const Candidate winner = draw(row, part.begin, part.end, best);
  if (threadIdx.x == 0) state.candidates[blockIdx.y] = winner;
}

// A kernel of its own for masks: they cost registers.
__global__ void __launch_bounds__(kDrawThreads, 3) draw_kernel(Arguments op) {
  wait_for_previous_kernel();
  op.masks = {};
  draw_slice(op);
}
__global__ void __launch_bounds__(kDrawThreads, 2) draw_masked_kernel(Arguments op) {
  wait_for_previous_kernel();
  draw_slice(op);
}

__global__ void __launch_bounds__(kThreads) finish_kernel(Arguments op, int slices) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(int, tokens, kMaxNodes);
  SPECENGINE_SHARED(int, parents, kMaxNodes);
  SPECENGINE_SHARED(int, drawn, kMaxNodes);
  SPECENGINE_SHARED(int, followed, kMaxNodes);
  SPECENGINE_SHARED(int, path, kMaxNodes);
  SPECENGINE_SHARED(int, length, 1);
  const int b = blockIdx.x, first = op.row_start[b], nodes = op.nodes(b), node = threadIdx.x;
  const bool idle = op.idle(b);
  if (!idle) op.table.clear(b, op.dense(b), op.first_of_request(), op.step_of_request());
  if (blockIdx.y != 0) return;
  if (node < nodes) tokens[node] = op.tokens[first + node], parents[node] = op.parents[first + node];
  __syncthreads();
  if (node < nodes && tokens[node] != kNoToken) {
    Candidate best = nothing();
    for (int i = 0; i < slices; ++i) best = better(best, op.row_states[first + node].candidates[i]);
    drawn[node] = static_cast<int>(best.token);
    KnownTokens known{{tokens, parents, nodes, {}}, drawn};
    followed[node] = known.load(node, {}) ? Match{}.step(known, node).child : -1;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int count = 0, bonus = kNoToken;
    for (int at = idle ? -1 : 0; at >= 0; at = followed[at]) path[count++] = at, bonus = drawn[at];
    length[0] = count, op.path_length[b] = count, op.bonus[b] = bonus, op.relaxed[b] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < op.columns; i += blockDim.x) {
    op.path[static_cast<int64_t>(b) * op.columns + i] = i < length[0] ? path[i] : -1;
  }
}

Arguments arguments_of(const VerifyTree& op) {
  Arguments a{};
  a.logits = op.logits.as<float>(), a.masks = op.masks_of(0);
  a.tokens = op.trees.tokens.as<int>(), a.parents = op.trees.parents.as<int>(),
  a.row_start = op.trees.row_start.as<int>();
  a.table = RequestTable(op.trees.sampling, op.trees.history, op.workspace.scores.shape[1]);
  a.path = op.accepted.path.as<int>(), a.path_length = op.accepted.path_length.as<int>(),
  a.bonus = op.accepted.bonus.as<int>();
  a.relaxed = op.accepted.relaxed.as<int>();
  a.biases = op.workspace.scores.as<float>(), a.counts = op.workspace.counts.as<int>(),
  a.row_states = op.workspace.row_states.as<RowState>();
  a.requests = static_cast<int>(op.accepted.bonus.shape[0]), a.columns = static_cast<int>(op.accepted.path.shape[1]);
  a.aligned = a.table.vocab % 4 == 0 && at_16_bytes(a.logits) && at_16_bytes(a.biases) && at_16_bytes(a.counts);
  return a;
}

}  // namespace

void run_cuda(const VerifyTree& op) {
  const int64_t M = op.trees.tokens.shape[0], B = op.accepted.bonus.shape[0], N = op.accepted.path.shape[1],
                V = op.workspace.scores.shape[1];
  if (B == 0) return;
  if (N > kMaxNodes) fail("path: expected at most ", kMaxNodes, " columns, got ", N);
  const DeviceGuard guard(op.trees.tokens.device_id);
  if (op.rule != "match") return verify_by_rule(op);
  if (!op.workspace.row_states.defined()) fail("row_states: expected a tensor, got None");
  const Arguments arguments = arguments_of(op);
  void* stream = op.trees.tokens.stream;
  int64_t parts = 1, slices = 1;
  if (M > 0) {
    parts = std::clamp<int64_t>(op.trees.history.tokens.shape[1] / 2048, 1, 32);
    const int64_t strips = (V + kStrip - 1) / kStrip;
    slices = std::clamp<int64_t>(4 * multiprocessors(op.trees.tokens.device_id) / M, 1,
                                 std::min<int64_t>(strips, kMaxSlices));
    launch({"verify_tree", dim3(B, parts), kThreads, 0, stream}, mark_kernel, arguments);
    launch({"verify_tree", dim3(M), kFilterThreads, 0, stream}, filter_kernel, arguments);
    launch({"verify_tree", dim3(M, slices), kDrawThreads, 0, stream},
           op.masks.defined() ? draw_masked_kernel : draw_kernel, arguments);
  }
  launch({"verify_tree", dim3(B, parts), kThreads, 0, stream}, finish_kernel, arguments, slices);
}

}  // namespace specengine
