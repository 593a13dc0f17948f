// Walks by every rule but `match` that read notes (note_rows.cu) instead of rows. Launches behind those of the notes:
//
// prepare: A block owns a part of a node's row: it computes a sum that a rule needs at every node (rules/cascade.h).
//
// step: Blocks (request, part) walk until the rule needs the vocabulary, at a refused child or for the last draw. Each
// computes its part of that sum or draw; the next step reads the parts and goes on (noted_rows.cuh).
//
// finish: A block per request does what the steps have left, and writes the path. The workspaces become zero again.
//
// Decisions are the CPU's: sums are of integers, and every thread computes the same doubles.
#include "cuda/sampling/walk_notes.cuh"

#include <algorithm>

#include "cuda/base/arch.cuh"
#include "cuda/sampling/any_rule.cuh"
#include "cuda/sampling/note_rows.cuh"
#include "cuda/sampling/noted_rows.cuh"

namespace specengine {
namespace {

// More rows than this are faster left to the blocks of verify_rules.cu: there are many of them, and they read fewer
// rows.
constexpr int64_t kMostNotedRows = 512;
// Two refused children and the draw behind them. A rule from the leaves up refuses a whole path first.
constexpr int kSteps = 3, kStepsFromLeaves = 8;
constexpr int kMaxWalkParts = 132;  // blocks of a request, of a few tokens for each thread in a vocabulary of 128k

struct WalkArguments : RuleRows {
  int *path, *path_length, *bonus, *relaxed;
  uint64_t* weights;  // [B, 4, V]: the log of each request's walk, and a flag for each step: whether the walk has ended
  int note_parts, walk_parts, steps, prepared;

  __device__ uint64_t* room(int b) const { return weights + b * kWeightPlanes * table.vocab; }
  __device__ uint64_t* ended(int b, int step) const { return room(b) + step; }
  __device__ PartResult* log(int b) const { return reinterpret_cast<PartResult*>(room(b) + (steps + 1) / 2 * 2); }
};
// Words of a request's room.
int64_t words_of_log(int64_t steps, int64_t parts) { return (steps + 1) / 2 * 2 + 2 * steps * parts; }

// All threads write the entries behind the path's end, one thread the path.
__device__ void write(const WalkArguments& op, int b, const DraftedTree& tree, const Verdict& end) {
  const bool idle = end.node < 0;
  const int length = idle ? 0 : tree.depth(end.node) + 1;
  int* path = op.path + static_cast<int64_t>(b) * op.columns;
  for (int i = length + threadIdx.x; i < op.columns; i += blockDim.x) path[i] = -1;
  if (threadIdx.x != 0) return;
  for (int i = length - 1, node = end.node; i >= 0; --i, node = tree.parent(node)) path[i] = node;
  op.path_length[b] = length, op.bonus[b] = end.token, op.relaxed[b] = end.relaxed;
}

// The request's tree and notes in shared memory, and the walk at its start. only: the one node whose notes are read;
// -1: all.
__device__ DraftedTree begin(const WalkArguments& op, int b, const WalkLaunch& launch, int only, int prepared) {
  SPECENGINE_SHARED(int, tokens, kMaxNodes);
  SPECENGINE_SHARED(int, parents, kMaxNodes);
  SPECENGINE_SHARED(double, values, kMaxNodes);
  SPECENGINE_SHARED(int, marks, kMaxNodes);
  SPECENGINE_SHARED(uint64_t, masses, kMaxNodes);
  SPECENGINE_SHARED(int16_t, first_child, kMaxNodes);
  SPECENGINE_SHARED(int16_t, next_sibling, kMaxNodes);
  SPECENGINE_DYNAMIC_SHARED(NodeNotes, notes);  // [columns], then the prepared sums
  uint64_t* const sums = reinterpret_cast<uint64_t*>(notes + op.columns);
  const int first = op.row_start[b], nodes = op.nodes(b);
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    tokens[node] = op.tokens[first + node], parents[node] = op.parents[first + node];
    masses[node] = kUnknownMass;
  }
  constexpr int kWords = sizeof(NodeNotes) / sizeof(uint64_t);
  const int from = only < 0 ? 0 : only, until = only < 0 ? nodes : only + 1;
  for (int i = from * kWords + threadIdx.x; i < until * kWords; i += blockDim.x) {
    reinterpret_cast<uint64_t*>(notes)[i] =
        reinterpret_cast<const uint64_t*>(&op.notes[first + i / kWords])[i % kWords];
  }
  for (int i = from * kMaxPrepared + threadIdx.x; i < until * kMaxPrepared; i += blockDim.x) {
    const int slot = i % kMaxPrepared;
    uint64_t sum = 0;
    for (int part = 0; slot < prepared && part < op.note_parts; ++part) {
      sum += op.notes[first + i / kMaxPrepared].prepared[slot][part];
    }
    sums[i] = sum;
  }
  const DraftedTree tree{tokens, parents, nodes, {op.masks.row(first), op.masks.words}};
  if (threadIdx.x == 0) {
    NodeState& state = node_state();
    state.begin(op, b, tree, launch);
    state.first_child = first_child, state.next_sibling = next_sibling;
    state.notes = notes, state.prepared_sums = sums, state.have_prepared = prepared;
    state.masses = masses, state.values = values, state.marks = marks;
  }
  __syncthreads();
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {  // links its children
    int16_t* last = &first_child[node];
#pragma unroll 1
    for (int child = 1; child < nodes; ++child) {
      if (parents[child] != node || child <= node || tokens[child] == kNoToken) continue;
      if (!is_allowed(tree.masks.row(node), tokens[child])) continue;
      *last = static_cast<int16_t>(child), last = &next_sibling[child];
    }
    *last = -1;
  }
  if (threadIdx.x == 0) next_sibling[0] = -1;
  __syncthreads();
  return tree;
}

// The sum of number `sum` at the block's node. Grid (M, parts).
__global__ void __launch_bounds__(kWalkThreads, 1) prepare_kernel(WalkArguments op, Cascade rule, int sum) {
  wait_for_previous_kernel();
  const int index = blockIdx.x, b = request_of_row(op);
  if (b < 0 || !op.has_draft(index) || !op.notes[index].node.has_draft) return;
  const NodeNotes& node = op.notes[index].node;
  if (!node.sides[0].sound || !node.sides[1].sound) return;
  SPECENGINE_SHARED(PartResult, results, 1);
  const WalkLaunch launch{nullptr, results, 0, static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y), false};
  const int at = index - op.row_start[b];
  NotedRows rows(begin(op, b, launch, at, sum));
  constexpr Needs needs = Cascade::needs;
  rows.load(at, needs);
  rule.prepare(rows);
  if (rows.stopped() && threadIdx.x == 0) op.notes[index].prepared[sum][blockIdx.y] = results[0].bits;
}

// Launch `step` of the walks; step == op.steps: the last one. Grid (B, parts), or B.
__global__ void __launch_bounds__(kWalkThreads, 1) walk_notes_kernel(WalkArguments op, AnyRule rule, int step) {
  wait_for_previous_kernel();
  const int b = blockIdx.x;
  const bool last = step == op.steps;
  if (op.idle(b)) {
    if (last) write(op, b, {}, {-1});
    return;
  }
  if (!last && step > 0 && *op.ended(b, step - 1) != 0) {
    if (blockIdx.y == 0 && threadIdx.x == 0) *op.ended(b, step) = 1;
    return;
  }
  PartResult* const log = op.log(b);
  const WalkLaunch launch{
      log, log + step * op.walk_parts + blockIdx.y, step, static_cast<int>(blockIdx.y), op.walk_parts, last};
  NotedRows rows(begin(op, b, launch, -1, op.prepared));
  Verdict end;
  rule.visit([&](const auto& one) { end = walk(one, rows); });
  if (!last) {
    if (blockIdx.y == 0 && threadIdx.x == 0) *op.ended(b, step) = rows.ended();
    return;
  }
  write(op, b, rows, end);
  op.table.clear(b, op.dense(b), threadIdx.x, blockDim.x);
}

WalkArguments arguments_of(const VerifyTree& op) {
  const int64_t V = op.workspace.scores.shape[1];
  WalkArguments a{};
  a.tokens = op.trees.tokens.as<int>(), a.parents = op.trees.parents.as<int>(),
  a.row_start = op.trees.row_start.as<int>();
  a.table = RequestTable(op.trees.sampling, op.trees.history, V);
  a.logits = {op.logits.as<float>(),
              op.draft.logits.as<float>(),
              op.draft.rows.as<int>(),
              op.draft.token_index.as<int>(),
              V,
              op.draft.logits.defined() ? op.draft.logits.shape[1] : 0,
              op.draft.replacement};
  a.masks = op.masks_of(0);
  a.path = op.accepted.path.as<int>(), a.path_length = op.accepted.path_length.as<int>(),
  a.bonus = op.accepted.bonus.as<int>(), a.relaxed = op.accepted.relaxed.as<int>();
  a.biases = op.workspace.scores.as<float>(), a.counts = op.workspace.counts.as<int>();
  a.weights = op.workspace.weights.as<uint64_t>(), a.notes = op.workspace.row_states.as<RowNotes>();
  a.requests = static_cast<int>(op.accepted.bonus.shape[0]), a.columns = static_cast<int>(op.accepted.path.shape[1]);
  a.aligned = V % 4 == 0 && at_16_bytes(a.logits.target) && at_16_bytes(a.logits.draft) && at_16_bytes(a.biases) &&
              at_16_bytes(a.counts);
  return a;
}

template <typename Rule>
void walk_by(const VerifyTree& op, const Rule& rule) {
  const int64_t M = op.trees.tokens.shape[0], B = op.accepted.bonus.shape[0], V = op.workspace.scores.shape[1];
  const int device = op.trees.tokens.device_id;
  void* const stream = op.trees.tokens.stream;
  WalkArguments a = arguments_of(op);
  a.needs = Rule::needs, a.all_nodes = !Rule::needs.weights;
  a.note_parts = note_rows({a, M, B, op.trees.history.tokens.shape[1], device, stream});

  const int64_t groups = (V + kGroups - 1) / kGroups;
  const int64_t parts = std::clamp<int64_t>(multiprocessors(device) / B, 1, std::min<int64_t>(groups, kMaxWalkParts));
  a.steps = std::is_same_v<Rule, Traversal> ? kStepsFromLeaves : kSteps;
  while (words_of_log(a.steps, parts) > kWeightPlanes * V) --a.steps;  // of small vocabularies
  a.walk_parts = static_cast<int>(parts);
  const size_t shared = a.columns * (sizeof(NodeNotes) + kMaxPrepared * sizeof(uint64_t));
  const auto config = [&](dim3 grid) { return LaunchConfig{"verify_tree", grid, dim3(kWalkThreads), shared, stream}; };
  if constexpr (std::is_same_v<Rule, Cascade>) {
    const int sums = a.logits.draft != nullptr ? rule.prepared_sums() : 0;
    for (int sum = 0; sum < sums; ++sum) {
      launch(config(dim3(static_cast<unsigned>(M), static_cast<unsigned>(a.note_parts))), prepare_kernel, a, rule, sum);
    }
    a.prepared = sums;
  }
  for (int step = 0; step < a.steps; ++step) {
    launch(config(dim3(static_cast<unsigned>(B), static_cast<unsigned>(parts))), walk_notes_kernel, a, AnyRule(rule),
           step);
  }
  launch(config(dim3(static_cast<unsigned>(B))), walk_notes_kernel, a, AnyRule(rule), a.steps);
}

}  // namespace

bool walk_with_notes(const VerifyTree& op) {
  const int64_t M = op.trees.tokens.shape[0];
  if (!op.workspace.row_states.defined() || M == 0 || M > kMostNotedRows) return false;
  bool walked = true;
  with_rule(op.rule, op.options, [&](auto rule) {
    using Rule = decltype(rule);
    if constexpr (std::is_same_v<Rule, Margin>) walked = !rule.strict;  // it reads a row so seldom that notes cost more
    if constexpr (!std::is_same_v<Rule, Match>) {
      if (walked) walk_by(op, rule);
    }
  });
  return walked;
}

}  // namespace specengine
