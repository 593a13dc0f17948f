// A block owns a request. Its threads share the candidates of the level and count, for each, how many are better.
// Floor: the level's candidates once.
#include "ops/growth/grow_level.h"

#include "cuda/base/arch.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

struct Grow {
  const int *best_tokens, *token_ids, *order, *roots, *known, *beam;
  const float* best_scores;
  const unsigned* above_bits;  // of the rows before
  int *tokens, *parents, *depths;
  float* scores;
  int *next_beam, *next_tokens, *next_depths;
  unsigned* next_bits;
  int64_t* next_above;
  int ids, columns, width, children, next, words, first, first_node;
  bool shared;  // whether all rows of a request have the same children
};

struct Child {
  int token, parent, depth;
  float score;
};

// Entry i of the level of request b. The root's column may not be written yet.
__device__ Child child_of(const Grow& op, int b, int i, bool known) {
  const int64_t own = static_cast<int64_t>(b) * op.columns, row = static_cast<int64_t>(b) * op.width + i / op.children;
  const int64_t place = (op.shared ? b : row) * (1 + op.children) + 1 + i % op.children;
  const int best = op.best_tokens[place], parent = op.beam[row];
  const bool below_root = op.first == 1;
  const int token = best < 0 || op.token_ids == nullptr ? best : best < op.ids ? op.token_ids[best] : -1;
  const float above = below_root ? 0.0f : op.scores[own + parent];
  const int parent_depth = below_root ? 0 : op.depths[own + parent];
  const int depth = !known || token < 0 || parent_depth < 0 ? -1 : parent_depth + 1;
  return {token, parent, depth, above + op.best_scores[place]};
}

// Makes candidate i of the level row `place` of the next pass.
__device__ void open_row(const Grow& op, int b, int i, int place, bool known) {
  const Child child = child_of(op, b, i, known);
  const int64_t before = static_cast<int64_t>(b) * op.width + i / op.children;
  const int64_t row = static_cast<int64_t>(b) * op.next + place;
  const bool used = child.depth >= 0;
  const int node = op.first_node + place;
  op.next_beam[row] = op.first + i, op.next_tokens[row] = used ? child.token : -1, op.next_depths[row] = child.depth;
  op.next_above[row] = before;
#pragma unroll 1
  for (int w = 0; w < op.words; ++w) {
    const unsigned own = node / 32 == w ? 1u << node % 32 : 0u;
    op.next_bits[row * op.words + w] = used ? op.above_bits[before * op.words + w] | own : 0u;
  }
}

__global__ void __launch_bounds__(kThreads) grow_level_kernel(Grow op) {
  SPECENGINE_SHARED(unsigned, keys, kMaxCandidates);
  wait_for_previous_kernel();
  const int b = blockIdx.x, level = op.width * op.children;
  const bool known = op.known[b] > 0;
  const int64_t own = static_cast<int64_t>(b) * op.columns;
  for (int i = threadIdx.x; i < level; i += kThreads) {
    const Child child = child_of(op, b, i, known);
    const int64_t column = own + op.first + i;
    op.tokens[column] = child.token, op.parents[column] = child.parent, op.depths[column] = child.depth;
    op.scores[column] = child.score;
    keys[i] = key_of(child.score);
  }
  if (op.first == 1 && threadIdx.x == 0) {
    op.tokens[own] = op.roots[b], op.parents[own] = -1, op.depths[own] = 0, op.scores[own] = 0.0f;
  }
  if (op.next == 0) return;
  if (op.order != nullptr) {
    for (int place = threadIdx.x; place < op.next; place += kThreads) {
      open_row(op, b, min(max(op.order[place], 0), level - 1), place, known);
    }
    return;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < level; i += kThreads) {
    const unsigned key = keys[i];
    int better = 0;
#pragma unroll 4
    for (int j = 0; j < level; ++j) better += keys[j] > key || (keys[j] == key && j < i);
    if (better < op.next) open_row(op, b, i, better, known);
  }
}

__global__ void __launch_bounds__(kThreads)
    limit_depths_kernel(const int* known, const int* history_length, const int* final_length, const int* active,
                        int* limits, int levels, int requests) {
  wait_for_previous_kernel();
  for (int b = threadIdx.x; b < requests; b += kThreads) {
    const int room = max(final_length[b] - history_length[b] - 1, 0);
    limits[b] = active[b] == 0 ? -1 : known[b] > 0 ? min(levels, room) : 0;
  }
}

}  // namespace

void run_cuda(const GrowLevel& op) {
  const int64_t B = op.roots.shape[0];
  if (B == 0) return;
  const DeviceGuard guard(op.roots.device_id);
  const Grow grow{op.best_tokens.as<int>(),
                  op.token_ids.as<int>(),
                  op.order.as<int>(),
                  op.roots.as<int>(),
                  op.known.as<int>(),
                  op.before.beam.as<int>(),
                  op.best_scores.as<float>(),
                  op.before.ancestors.as<unsigned>(),
                  op.candidates.tokens.as<int>(),
                  op.candidates.parents.as<int>(),
                  op.candidates.depths.as<int>(),
                  op.candidates.scores.as<float>(),
                  op.after.beam.as<int>(),
                  op.after.tokens.as<int>(),
                  op.after.depths.as<int>(),
                  op.after.ancestors.as<unsigned>(),
                  op.after.above.as<int64_t>(),
                  op.token_ids.given() ? static_cast<int>(op.token_ids.shape[0]) : 0,
                  static_cast<int>(op.candidates.tokens.shape[1]),
                  static_cast<int>(op.before.beam.shape[1]),
                  static_cast<int>(op.best_tokens.shape[1] - 1),
                  static_cast<int>(op.after.beam.shape[1]),
                  static_cast<int>(op.before.ancestors.shape[1]),
                  static_cast<int>(op.first),
                  static_cast<int>(op.first_node),
                  op.best_tokens.shape[0] == B};
  launch({"grow_level", dim3(static_cast<unsigned>(B)), dim3(kThreads), 0, op.roots.stream}, grow_level_kernel, grow);
}

void run_cuda(const LimitDepths& op) {
  const int64_t B = op.known.shape[0];
  if (B == 0) return;
  const DeviceGuard guard(op.known.device_id);
  launch({"limit_depths", dim3(1), dim3(kThreads), 0, op.known.stream}, limit_depths_kernel, op.known.as<int>(),
         op.history_length.as<int>(), op.final_length.as<int>(), op.active.as<int>(), op.limits.as<int>(),
         static_cast<int>(op.levels), static_cast<int>(B));
}

}  // namespace specengine
