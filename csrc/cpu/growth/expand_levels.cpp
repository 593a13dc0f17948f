// Pass 1, one task per level and request: the likeliest tokens. Pass 2, one task per request: the tree.
#include "ops/growth/expand_levels.h"

#include <algorithm>
#include <vector>

#include "cpu/best_of_row.h"
#include "cpu/parallel_for.h"
#include "growth/backbone.h"
#include "growth/ranks.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// Room for the nodes of one tree.
struct Room {
  int parents[kMaxNodes], depths[kMaxNodes], ranks[kMaxNodes], next[kMaxNodes];
  double scores[kMaxNodes];
  float above[kMaxNodes];
  GrownNodes nodes() { return {parents, depths, ranks, scores}; }
};

void check_widths(const TensorView& widths, const TensorView& thresholds, int64_t most) {
  for (int64_t i = 0; i < widths.shape[0]; ++i) {
    const int32_t width = widths.as<int32_t>()[i];
    if (width < 1 || width > most) fail("widths: entry ", i, " is ", width, ", expected 1 to ", most);
  }
  for (int64_t i = 0; i < thresholds.shape[0]; ++i) {
    const float* x = thresholds.as<float>() + i;
    if (!(x[0] > (i > 0 ? x[-1] : -INFINITY)))
      fail("thresholds: entry ", i, " is ", x[0], ", expected ascending numbers");
  }
}

void check_ranks(const LevelShape& shape, int64_t children, int64_t levels) {
  const int32_t *ranks = shape.ranks.as<int32_t>(), *parents = shape.parents.as<int32_t>();
  const int32_t* depths = shape.depths.as<int32_t>();
  for (int64_t i = 0; i < shape.ranks.shape[0]; ++i) {
    const int32_t parent = parents[i];
    if (parent < 0 || parent > i) fail("shape.parents: entry ", i, " is ", parent, ", expected 0 to ", i);
    const int32_t depth = 1 + (parent == 0 ? 0 : depths[parent - 1]);
    if (depths[i] != depth || depth > levels) {
      fail("shape.depths: entry ", i, " is ", depths[i], ", expected ", depth, ", at most ", levels, " levels");
    }
    if (ranks[i] < 0 || ranks[i] >= children) {
      fail("shape.ranks: entry ", i, " is ", ranks[i], ", expected 0 to ", children - 1);
    }
  }
}

int grow_backbone(const TensorView& widths, const TensorView& thresholds, const ChildLists& children, int levels,
                  Room& room) {
  const Widths own{thresholds.as<float>(), widths.as<int>(), static_cast<int>(thresholds.shape[0])};
  const Backbone backbone{own, room.next, room.above};
  for (int level = 0; level < levels; ++level) {
    backbone.first[level] = backbone.widths.of(children.log_prob(level, 0));
  }
  const int count = backbone.number(children, levels);
  for (int node = 1; node < count; ++node) backbone.write(room.nodes(), node, children, levels);
  return count;
}

// Returns how many nodes there are.  deepest: of the tree.  most: nodes.
int grow(const LevelShape& shape, const ChildLists& children, int levels, int deepest, int most, Room& room) {
  if (shape.shape() == ShapeKind::kRanks) {
    const RankShape ranks{shape.ranks.as<int>(), shape.parents.as<int>(), shape.depths.as<int>(), most - 1};
    for (int node = 1; node < most; ++node) ranks.write(room.nodes(), node, children, levels);
    return most;
  }
  if (shape.shape() == ShapeKind::kBackbone) {
    return grow_backbone(shape.widths, shape.thresholds, children, deepest, room);
  }
  BestFirst tree{room.nodes(), room.next, children, false, shape.best_first(), shape.beta, most, deepest, 0};
  specengine::grow(tree, OneThread{});
  return tree.count;
}

// The lists of children of rows of logits; list r is at r * stride.
struct Lists {
  const float* logits;
  int32_t* tokens;
  float* log_probs;
  int64_t rows, vocabulary, children, stride;

  // is_read(row): whether the row's request drafts.  refuse(x, row): reports one without a distribution.
  template <typename IsRead, typename Refuse>
  void find(const IsRead& is_read, const Refuse& refuse) const {
    std::vector<uint8_t> sound(rows);
    parallel_for(rows, [&](int64_t row) {
      sound[row] = !is_read(row) || has_distribution(logits + row * vocabulary, vocabulary);
    });
    const int64_t bad = std::find(sound.begin(), sound.end(), 0) - sound.begin();
    if (bad < rows) refuse(logits + bad * vocabulary, bad);
    parallel_for(rows, [&](int64_t row) {
      if (!is_read(row)) return;
      best_of_row(logits + row * vocabulary, vocabulary, children, tokens + row * stride, log_probs + row * stride);
    });
  }

  // Every `step`th list from a row on.
  ChildLists from(int64_t row, int64_t step) const {
    return {tokens + row * stride, log_probs + row * stride, step * stride, static_cast<int>(children)};
  }
};

// Where the tree of request b goes.
struct Columns {
  int32_t *tokens, *parents, *depths;
  float* scores;
  int64_t size;

  template <typename Trees>
  static Columns of(const Trees& trees, int64_t b) {
    const int64_t size = trees.tokens.shape[1];
    return {trees.tokens.template as<int32_t>() + b * size, trees.parents.template as<int32_t>() + b * size,
            trees.depths.template as<int32_t>() + b * size, trees.scores.template as<float>() + b * size, size};
  }

  void clear() const {
    std::fill(tokens, tokens + size, -1), std::fill(parents, parents + size, -1), std::fill(depths, depths + size, -1);
    std::fill(scores, scores + size, 0.0f);
  }

  // Writes a tree whose nodes are deeper than `deepest` where they do not count.
  void write(int32_t root, const GrownNodes& nodes, int count, int deepest, const ChildLists& children,
             const TensorView& token_ids) const {
    clear();
    tokens[0] = root, depths[0] = 0;
    for (int node = 1; node < count; ++node) {
      if (nodes.depths[node] > deepest) continue;
      const int32_t token = children.token(nodes.depths[node] - 1, nodes.ranks[node]);
      const int32_t own = token_ids.given() ? token_ids.as<int32_t>()[token] : token;
      if (own < 0) continue;
      tokens[node] = own, parents[node] = nodes.parents[node], depths[node] = nodes.depths[node];
      scores[node] = static_cast<float>(nodes.scores[node]);
    }
  }
};

void write_ancestors(const TensorView& ancestors, int64_t b, const int32_t* parents, int count) {
  const int64_t nodes = ancestors.shape[1], words = ancestors.shape[2];
  uint32_t* bits = ancestors.as<uint32_t>() + b * nodes * words;
  std::fill(bits, bits + nodes * words, 0u);
  for (int node = 0; node < count; ++node) {
    if (node > 0) std::copy_n(bits + parents[node] * words, words, bits + node * words);
    bits[node * words + node / 32] |= 1u << node % 32;
  }
}

}  // namespace

void run(const ExpandLevels& op) {
  const int64_t B = op.known.shape[0], k = op.parts.tokens.shape[2];
  const int levels = static_cast<int>(op.levels);
  if (op.shape.shape() == ShapeKind::kRanks) check_ranks(op.shape, k, levels);
  if (op.shape.shape() == ShapeKind::kBackbone) check_widths(op.shape.widths, op.shape.thresholds, k);
  const DeepestLevel deepest = op.limits.deepest(op.known, levels);
  const Lists lists{op.logits.as<float>(),       op.parts.tokens.as<int32_t>(),
                    op.parts.scores.as<float>(), B * levels,
                    op.logits.shape[1],          k,
                    k * op.parts.tokens.shape[1]};
  const auto request_of = [&](int64_t row) { return op.by_request ? row / levels : row % B; };
  lists.find([&](int64_t row) { return deepest.of(static_cast<int>(request_of(row))) > 0; },
             [&](const float* x, int64_t row) { refuse_row(x, lists.vocabulary, row); });
  parallel_for(B, [&](int64_t b) {
    const ChildLists children = lists.from(op.row_of(b, 0), op.by_request ? 1 : B);
    const Columns columns = Columns::of(op.candidates, b);
    const int limit = deepest.of(static_cast<int>(b));
    Room room;
    const int count = limit == 0 ? 1 : grow(op.shape, children, levels, limit, static_cast<int>(columns.size), room);
    columns.write(op.where_roots_are().of(static_cast<int>(b)), room.nodes(), count, limit, children, op.token_ids);
  });
}

void run(const ExpandBackbone& op) {
  const int64_t B = op.logits.shape[0], T = op.logits.shape[1], k = op.top_tokens.shape[3];
  const int levels = static_cast<int>(T);
  check_widths(op.widths, op.thresholds, k);
  const int32_t* roots = op.root.as<int32_t>();
  const Lists lists{
      op.logits.as<float>(),     op.top_tokens.as<int32_t>(), op.top_scores.as<float>(), B * T, op.logits.shape[2], k,
      k * op.top_tokens.shape[2]};
  lists.find([&](int64_t row) { return roots[row / T] >= 0; },
             [&](const float* x, int64_t row) { refuse_row(x, lists.vocabulary, row / T, row % T); });
  parallel_for(B, [&](int64_t b) {
    const ChildLists children = lists.from(b * T, 1);
    const Columns columns = Columns::of(op.trees, b);
    Room room;
    const bool idle = roots[b] < 0;
    const int count = idle ? 0 : grow_backbone(op.widths, op.thresholds, children, levels, room);
    if (idle) {
      columns.clear();
    } else {
      columns.write(roots[b], room.nodes(), count, levels, children, op.token_ids);
    }
    write_ancestors(op.trees.ancestors, b, room.parents, count);
    op.trees.node_counts.as<int32_t>()[b] = count;
  });
}

}  // namespace specengine::SPECENGINE_ISA
