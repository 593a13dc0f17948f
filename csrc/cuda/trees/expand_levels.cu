// Trees from the logits of all their levels. A block owns one part of one level's vocabulary. It reads the part once,
// into shared memory, finds its best tokens and sums its exponentials. The last block of a request to finish merges the
// parts, a warp per level, and builds the tree by its shape. Floor: 4 V per level, the logits.
#include "ops/growth/expand_levels.h"

#include <algorithm>

#include "cuda/base/last_block.cuh"
#include "cuda/trees/best_first.cuh"
#include "cuda/trees/top_tokens.cuh"
#include "growth/backbone.h"
#include "growth/ranks.h"

namespace specengine {
namespace {

static_assert(2 * (kMaxLevelChildren + kMaxNodes) <= kPart, "the room for scores holds the lists later");
static_assert(kMaxNodes <= kTopThreads, "a thread writes a node");

// What becomes of a request without a tree.
enum class Empty { kRoot, kNothing };

struct Levels {
  TopParts top;  // a row per level and request
  DeepestLevel deepest;
  Roots roots;
  const int* token_ids;
  int *tokens, *parents, *depths;
  float* scores;
  unsigned* ancestors;  // nullptr: not written
  int* node_counts;     // nullptr: not written
  int* arrived;
  int batch, ids, columns, words;
  bool by_request;

  __device__ int64_t row_of(int b, int level) const {
    return by_request ? static_cast<int64_t>(b) * deepest.levels + level : static_cast<int64_t>(level) * batch + b;
  }
};

// Shapes: grow() writes the nodes of a tree of at most `deepest` levels, the whole block, and returns their number to
// all threads.  numbers, floats: shared, kMaxNodes each.
struct Ranked {
  RankShape shape;

  __device__ int grow(const GrownNodes& nodes, const ChildLists& children, int levels, int, int*, float*) const {
    const int node = static_cast<int>(threadIdx.x);
    if (node > 0 && node <= shape.count) shape.write(nodes, node, children, levels);
    __syncthreads();
    return 1 + shape.count;
  }
};

struct Comb {
  const float* thresholds;
  const int* widths;
  int bins, width;

  __device__ int grow(const GrownNodes& nodes, const ChildLists& children, int, int deepest, int* numbers,
                      float* floats) const {
    SPECENGINE_SHARED(int, count, 1);
    const Backbone backbone{{thresholds, widths, bins}, numbers, floats};
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < deepest) numbers[thread] = min(max(backbone.widths.of(children.log_prob(thread, 0)), 1), width);
    __syncthreads();
    if (thread == 0) count[0] = backbone.number(children, deepest);
    __syncthreads();
    if (thread > 0 && thread < count[0]) backbone.write(nodes, thread, children, deepest);
    __syncthreads();
    return count[0];
  }
};

struct BestNodes {
  BestFirstKind kind;
  double beta;
  int most;

  __device__ int grow(const GrownNodes& nodes, const ChildLists& children, int, int deepest, int* numbers,
                      float*) const {
    SPECENGINE_SHARED(int, count, 1);
    if (threadIdx.x < kWarp) {
      BestFirst tree{nodes, numbers, children, false, kind, beta, most, deepest, 0};
      specengine::grow(tree, OneWarp{});
      if (threadIdx.x == 0) count[0] = tree.count;
    }
    __syncthreads();
    return count[0];
  }
};

// Writes one column: the root, a node, or padding.  exists: whether there is a root.
__device__ void write_column(const Levels& op, int b, int node, int count, bool exists, int deepest,
                             const GrownNodes& nodes, const ChildLists& children) {
  const int64_t place = static_cast<int64_t>(b) * op.columns + node;
  int token = exists && node == 0 ? op.roots.of(b) : -1, parent = -1, depth = exists && node == 0 ? 0 : -1;
  float score = 0;
  if (node > 0 && node < count && nodes.depths[node] <= deepest) {
    const int own = children.token(nodes.depths[node] - 1, nodes.ranks[node]);
    token = op.token_ids == nullptr ? own : own < op.ids ? op.token_ids[own] : -1;
    if (token >= 0)
      parent = nodes.parents[node], depth = nodes.depths[node], score = static_cast<float>(nodes.scores[node]);
  }
  op.tokens[place] = token, op.parents[place] = parent, op.depths[place] = depth, op.scores[place] = score;
  if (op.ancestors == nullptr) return;
  int on_path = depth >= 0 ? node : -1;  // nodes descend on the way up, and so do their words
  for (int w = op.words - 1; w >= 0; --w) {
    unsigned bits = 0;
    for (; on_path >= 0 && on_path / 32 == w; on_path = on_path > 0 ? nodes.parents[on_path] : -1) {
      bits |= 1u << on_path % 32;
    }
    op.ancestors[place * op.words + w] = bits;
  }
}

// empty: what a request gets that drafts nothing.
template <typename Shape>
__global__ void __launch_bounds__(kTopThreads) expand_levels_kernel(Levels op, Shape shape, Empty empty) {
  SPECENGINE_SHARED(float4, room, kPart / 4);
  SPECENGINE_SHARED(uint64_t, best_of, kWarp);
  SPECENGINE_SHARED(float, scratch, kWarp);
  SPECENGINE_SHARED(double, node_scores, kMaxNodes);
  SPECENGINE_SHARED(int, node_parents, kMaxNodes);
  SPECENGINE_SHARED(int, node_depths, kMaxNodes);
  SPECENGINE_SHARED(int, node_ranks, kMaxNodes);
  wait_for_previous_kernel();
  const int levels = op.deepest.levels, width = op.top.width;
  const int b = blockIdx.y, part = blockIdx.x % op.top.parts, level = blockIdx.x / op.top.parts;
  const bool idle = empty == Empty::kNothing && op.roots.of(b) < 0;
  const int deepest = idle ? 0 : op.deepest.of(b);
  if (deepest > 0 && level < levels) {
    score_part(op.top, op.row_of(b, level), part, reinterpret_cast<float*>(room), best_of, scratch);
  }

  if (!is_last_to_arrive(op.arrived + b, static_cast<int>(gridDim.x))) return;

  int* const tokens = reinterpret_cast<int*>(room);  // of all levels, `width` each
  float* const log_probs = reinterpret_cast<float*>(room) + kMaxLevelChildren;
  int* const numbers = tokens + 2 * kMaxLevelChildren;
  float* const floats = reinterpret_cast<float*>(numbers) + kMaxNodes;
  bool unsound = false;
  if (deepest > 0) {
    for (int t = threadIdx.x / kWarp; t < levels; t += kTopWarps) {
      merge_parts(op.top, op.row_of(b, t), tokens + t * width, log_probs + t * width);
    }
    __syncthreads();
    for (int t = threadIdx.x; t < levels; t += kTopThreads) unsound |= log_probs[t * width] != log_probs[t * width];
  }
  unsound = __syncthreads_or(unsound);

  const GrownNodes nodes{node_parents, node_depths, node_ranks, node_scores};
  const ChildLists children{tokens, log_probs, width, width};
  int count = idle ? 0 : 1;
  if (deepest > 0 && !unsound) count = shape.grow(nodes, children, levels, deepest, numbers, floats);
  for (int node = threadIdx.x; node < op.columns; node += kTopThreads) {
    write_column(op, b, node, count, !idle, deepest, nodes, children);
  }
  if (op.node_counts != nullptr && threadIdx.x == 0) op.node_counts[b] = unsound ? -1 : count;
}

// Trees: candidates or BackboneTrees.
template <typename Trees>
Levels levels_of(const TopParts& top, const DeepestLevel& deepest, const Roots& roots, const OptionalTensor& token_ids,
                 const Trees& trees, const TensorView& arrived, bool by_request) {
  return {top,
          deepest,
          roots,
          token_ids.as<int>(),
          trees.tokens.template as<int>(),
          trees.parents.template as<int>(),
          trees.depths.template as<int>(),
          trees.scores.template as<float>(),
          nullptr,
          nullptr,
          arrived.as<int>(),
          static_cast<int>(trees.tokens.shape[0]),
          token_ids.given() ? static_cast<int>(token_ids.shape[0]) : 0,
          static_cast<int>(trees.tokens.shape[1]),
          0,
          by_request};
}

template <typename Shape>
void launch_levels(const char* name, const Levels& levels, const Shape& shape, Empty empty, void* stream) {
  const int64_t blocks = std::max<int64_t>(1, static_cast<int64_t>(levels.deepest.levels) * levels.top.parts);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(levels.batch));
  launch({name, grid, kTopThreads, 0, stream}, expand_levels_kernel<Shape>, levels, shape, empty);
}

Comb comb_of(const TensorView& thresholds, const TensorView& widths, int64_t width) {
  return {thresholds.as<float>(), widths.as<int>(), static_cast<int>(thresholds.shape[0]), static_cast<int>(width)};
}

}  // namespace

void run_cuda(const ExpandLevels& op) {
  const int64_t width = op.parts.tokens.shape[2];
  if (op.known.shape[0] == 0) return;
  const DeviceGuard guard(op.logits.device_id);
  const TopParts top = top_parts_of(op.logits, op.parts);
  const Levels levels = levels_of(top, op.limits.deepest(op.known, op.levels), op.where_roots_are(), op.token_ids,
                                  op.candidates, op.parts.arrived, op.by_request);
  const auto run = [&](const auto& shape) {
    launch_levels("expand_levels", levels, shape, Empty::kRoot, op.logits.stream);
  };
  const LevelShape& shape = op.shape;
  if (shape.shape() == ShapeKind::kRanks) {
    run(Ranked{{shape.ranks.as<int>(), shape.parents.as<int>(), shape.depths.as<int>(), levels.columns - 1}});
  } else if (shape.shape() == ShapeKind::kBackbone) {
    run(comb_of(shape.thresholds, shape.widths, width));
  } else {
    run(BestNodes{shape.best_first(), shape.beta, levels.columns});
  }
}

void run_cuda(const ExpandBackbone& op) {
  const int64_t B = op.logits.shape[0], T = op.logits.shape[1], width = op.top_tokens.shape[3];
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
                     static_cast<int>(width)};
  const DeepestLevel all{nullptr, nullptr, nullptr, nullptr, nullptr, static_cast<int>(T)};
  Levels levels = levels_of(top, all, {op.root.as<int>(), nullptr, 1}, op.token_ids, op.trees, op.arrived, true);
  levels.ancestors = op.trees.ancestors.as<unsigned>(), levels.node_counts = op.trees.node_counts.as<int>();
  levels.words = static_cast<int>(op.trees.ancestors.shape[2]);
  launch_levels("expand_backbone", levels, comb_of(op.thresholds, op.widths, width), Empty::kNothing, op.logits.stream);
}

}  // namespace specengine
