#include "growth/grow.h"

#include <stdexcept>

#include "growth/select.h"
#include "growth/shapes.h"
#include "growth/stop.h"
#include "ops/top_tokens.h"

namespace specengine {
namespace {

// The expanded nodes of a level.
struct Beam {
  TensorView columns, tokens, depths, ancestors, above;

  Beam(int64_t rows, int64_t words, Workspace& space)
      : columns(space.ints({rows})),
        tokens(space.ints({rows})),
        depths(space.ints({rows})),
        ancestors(space.ints({rows, words})),
        above(space.longs({rows})) {}
};

// The tensors of B trees with C candidates and N nodes that grow T levels. best: k children of every row that gives
// logits, level after level.
struct TreeRows {
  TensorView roots, known, tokens, parents, depths, scores;  // [B] each; [B, C] each
  Beam even, odd;
  TensorView own_tokens, row_start, best_tokens, best_scores, kept, kept_depths, kept_bits;

  TreeRows(int64_t B, int64_t C, int64_t N, const DraftSizes& sizes, Workspace& space)
      : roots(space.ints({B})),
        known(space.ints({B})),
        tokens(space.ints({B, C})),
        parents(space.ints({B, C})),
        depths(space.ints({B, C})),
        scores(space.floats({B, C})),
        even(B * sizes.beam, (sizes.expanded() + 31) / 32, space),
        odd(B * sizes.beam, (sizes.expanded() + 31) / 32, space),
        own_tokens(space.ints({B * sizes.beam})),
        row_start(space.ints({B + 1})),
        best_tokens(space.ints({B * sizes.expanded(), sizes.children})),
        best_scores(space.floats({B * sizes.expanded(), sizes.children})),
        kept(space.ints({B, N})),
        kept_depths(space.ints({B, N})),
        kept_bits(space.ints({B, N, (N + 31) / 32})) {}
};

class Trees {
 public:
  Trees(const DraftInputs& inputs, const OptionalTensor& vocabulary, const GrowthShape& shape,
        const GrowthLimits& limits, const DraftSizes& sizes)
      : shape_(shape),
        limits_(limits),
        sizes_(sizes),
        vocabulary_(vocabulary),
        widths_(shape.widths.begin(), shape.widths.end()),
        B_(inputs.requests()),
        C_(shape.candidates(limits.levels)),
        N_(std::min(shape.nodes, C_)),
        k_(sizes.children),
        own_(B_, C_, N_, sizes) {
    for (int64_t b = 0; b < B_; ++b) own_->roots.as<int32_t>()[b] = token_of(inputs, b);
    std::fill_n(own_->known.as<int32_t>(), B_, 1);
    std::fill_n(own_->depths.as<int32_t>(), B_ * C_, -1);  // no candidate yet
    std::fill_n(own_->even.columns.as<int32_t>(), B_, 0);
    std::fill_n(own_->even.ancestors.as<int32_t>(), own_->even.ancestors.numel(), 0);
    const int64_t words = own_->even.ancestors.shape[1];
    for (int64_t b = 0; b < B_; ++b) own_->even.ancestors.as<uint32_t>()[b * words] = 1;  // node 0 is the root
  }

  int64_t levels() const { return levels_; }  // grown

  // Reads logits of rows that come next.
  void read(const TensorView& logits, const char* cause) {
    const TensorView tokens = rows_of(own_->best_tokens, read_, logits.shape[0]);
    const TensorView scores = rows_of(own_->best_scores, read_, logits.shape[0]);
    try {
      run_cpu(TopTokens{logits, tokens, scores});
    } catch (const std::invalid_argument& error) {  // the logits that it names are no argument of the caller
      fail(cause, ": level ", levels_, " has no distribution; ", error.what());
    }
    read_ += logits.shape[0];
  }

  // Adds a level of what was read; chooses the rows that come next, none behind the last level.
  void add() {
    const bool last = levels_ + 1 == limits_.levels;
    const int64_t first_row = B_ * rows_before(levels_);
    const int32_t* tokens = own_->best_tokens.as<int32_t>() + first_row * k_;
    const float* scores = own_->best_scores.as<float>() + first_row * k_;
    const Beam &before = levels_ % 2 ? own_->odd : own_->even, &after = levels_ % 2 ? own_->even : own_->odd;
    const int width = levels_ == 0 ? 1 : static_cast<int>(sizes_.beam);
    grown_ = growth(before, after, width, last ? 0 : static_cast<int>(sizes_.beam));
    const LikeliestChildren children{widths(), {nullptr, 1}};
    for (int b = 0; b < B_; ++b) {
      grow_level(grown_, b, [&](int row, int j) {
        const int64_t at = (int64_t{b} * width + row) * k_;
        return children.child(at, j, tokens + at, scores + at);
      });
    }
    for (int64_t r = 0; r < B_ * grown_.next; ++r) {
      const int entry = grown_.next_beam[r] - grown_.first;
      own_->own_tokens.as<int32_t>()[r] = tokens[r / grown_.next * grown_.level + entry];
    }
    ++levels_;
  }

  bool another_level_pays() const {
    const Reached reached{own_->scores.as<float>(), C_, grown_.next_beam, grown_.next};
    return specengine::another_level_pays(reached, B_, levels_, limits_.min_gain);
  }

  LevelRows rows() const {
    const Beam& beam = levels_ % 2 ? own_->odd : own_->even;
    const int64_t R = B_ * sizes_.beam;
    for (int64_t b = 0; b <= B_; ++b) own_->row_start.as<int32_t>()[b] = static_cast<int32_t>(b * sizes_.beam);
    return {beam.tokens,         own_->own_tokens,
            beam.depths,         rows_of(beam.above, 0, R),
            own_->row_start,     sizes_.beam == 1 ? OptionalTensor() : OptionalTensor(beam.ancestors),
            rows_before(levels_)};
  }

  // Adds the nodes of all levels, each the child of a rank.
  void add_ranks() {
    for (int64_t b = 0; b < B_; ++b) {
      const int64_t own = b * C_;
      int32_t *tokens = own_->tokens.as<int32_t>() + own, *parents = own_->parents.as<int32_t>() + own;
      int32_t* depths = own_->depths.as<int32_t>() + own;
      float* scores = own_->scores.as<float>() + own;
      tokens[0] = own_->roots.as<int32_t>()[b], parents[0] = -1, depths[0] = 0, scores[0] = 0.0f;
      for (int64_t i = 0; i + 1 < C_; ++i) {
        const int64_t at = place_of_rank(b, i), token = own_->best_tokens.as<int32_t>()[at];
        tokens[1 + i] = vocabulary_.defined() ? vocabulary_.as<int32_t>()[token] : static_cast<int32_t>(token);
        parents[1 + i] = static_cast<int32_t>(shape_.parents[i]);
        depths[1 + i] = static_cast<int32_t>(shape_.depths[i]);
        scores[1 + i] = scores[shape_.parents[i]] + own_->best_scores.as<float>()[at];
      }
    }
    levels_ = limits_.levels;
  }

  // Returns the best nodes of every request.
  DraftedTrees select() const {
    int32_t* depths = own_->depths.as<int32_t>();
    for (int64_t i = 0; limits_.min_reach > 0 && i < B_ * C_; ++i) {  // a node reaches less than its parent
      if (depths[i] > 0 && std::exp(static_cast<double>(own_->scores.as<float>()[i])) < limits_.min_reach) {
        depths[i] = -1;
      }
    }
    DraftedTrees trees{Ints(B_ * N_), Ints(B_ * N_), std::vector<double>(B_ * N_), Ints(B_), N_, levels_};
    const auto view = [&](Ints& x) { return tensor(x.data(), DType::kInt32, {B_, N_}); };
    const TensorView counts = tensor(trees.counts.data(), DType::kInt32, {B_});
    run_cpu(SelectNodes{own_->tokens, own_->parents, own_->depths, own_->scores, limits_.deepest, view(trees.tokens),
                        view(trees.parents), own_->kept_depths, own_->kept, own_->kept_bits, counts});
    for (int64_t b = 0; b < B_; ++b) {
      for (int64_t i = 0; i < trees.counts[b]; ++i) {
        const int64_t candidate = own_->kept.as<int32_t>()[b * N_ + i];
        trees.chances[b * N_ + i] = i == 0 ? 1.0 : std::exp(static_cast<double>(log_prob(b, candidate)));
      }
    }
    return trees;
  }

 private:
  using Ints = std::vector<int32_t>;

  static int32_t token_of(const DraftInputs& inputs, int64_t b) {
    return inputs.tokens.as<int32_t>()[inputs.last.as<int32_t>()[b]];
  }

  // Rows of a request in the levels before.
  int64_t rows_before(int64_t level) const { return level == 0 ? 0 : 1 + (level - 1) * sizes_.beam; }

  int64_t place_of_rank(int64_t b, int64_t node) const {
    return ((shape_.depths[node] - 1) * B_ + b) * k_ + shape_.ranks[node];
  }

  // Of a candidate given its parent.
  float log_prob(int64_t b, int64_t candidate) const {
    const float* scores = own_->best_scores.as<float>();
    if (!shape_.ranks.empty()) return scores[place_of_rank(b, candidate - 1)];
    const int64_t depth = own_->depths.as<int32_t>()[b * C_ + candidate], before = rows_before(depth - 1);
    const int64_t width = depth == 1 ? 1 : sizes_.beam;
    return scores[(B_ * before + b * width) * k_ + candidate - 1 - before * k_];
  }

  Widths widths() const {
    if (widths_.empty()) return {nullptr, nullptr, 0};
    return {shape_.thresholds.data(), widths_.data(), static_cast<int>(shape_.thresholds.size())};
  }

  Growth growth(const Beam& before, const Beam& after, int width, int next) const {
    return {vocabulary_.defined() ? vocabulary_.as<int>() : nullptr,
            nullptr,
            nullptr,
            own_->roots.as<int>(),
            own_->known.as<int>(),
            before.columns.as<int>(),
            before.ancestors.as<unsigned>(),
            own_->tokens.as<int>(),
            own_->parents.as<int>(),
            own_->depths.as<int>(),
            own_->scores.as<float>(),
            after.columns.as<int>(),
            after.tokens.as<int>(),
            after.depths.as<int>(),
            after.ancestors.as<unsigned>(),
            after.above.as<int64_t>(),
            nullptr,
            vocabulary_.defined() ? static_cast<int>(vocabulary_.shape[0]) : 0,
            static_cast<int>(C_),
            width,
            static_cast<int>(k_),
            width * static_cast<int>(k_),
            next,
            static_cast<int>(before.ancestors.shape[1]),
            static_cast<int>(1 + rows_before(levels_) * k_),
            static_cast<int>(rows_before(levels_ + 1)),
            true};
  }

  const GrowthShape& shape_;
  const GrowthLimits& limits_;
  const DraftSizes& sizes_;
  const OptionalTensor& vocabulary_;
  std::vector<int> widths_;
  int64_t B_, C_, N_, k_, levels_ = 0, read_ = 0;
  Placed<TreeRows> own_;
  Growth grown_{};  // the last level
};

}  // namespace

void GrowthShape::validate() const {
  if (children < 1 || children >= kMaxNodes) fail("children: expected 1 to ", kMaxNodes - 1, ", got ", children);
  if (beam < 1 || beam > children) fail("beam: expected 1 to children=", children, ", got ", beam);
  if (nodes < 1 || nodes > kMaxNodes) fail("nodes: expected 1 to ", kMaxNodes, ", got ", nodes);
  if (widths.empty() ? !thresholds.empty() : widths.size() != thresholds.size() + 1) {
    fail("widths: expected one more than thresholds, or neither, got ", widths.size(), " and ", thresholds.size());
  }
  for (size_t i = 0; i < thresholds.size(); ++i) {
    if (!(thresholds[i] > (i ? thresholds[i - 1] : -INFINITY))) fail("thresholds: expected ascending numbers");
  }
  for (int64_t width : widths) {
    if (width < 1 || width > children) fail("widths: expected 1 to children=", children, ", got ", width);
  }
  const size_t N = ranks.size();
  if (parents.size() != N || depths.size() != N) fail("ranks: expected a parent, a depth and a rank of each node");
  if (N > 0 && (beam > 1 || !widths.empty())) fail("ranks: expected no beam and no widths beside them");
  for (size_t i = 0; i < N; ++i) {
    const int64_t parent = parents[i], above = i ? depths[i - 1] : 1;
    if (parent < 0 || parent > static_cast<int64_t>(i)) fail("parents: node ", i, " has parent ", parent);
    if (depths[i] != (parent ? depths[parent - 1] + 1 : 1) || depths[i] < above) {
      fail("depths: node ", i, " has depth ", depths[i], ", expected one below its parent, level by level");
    }
    if (ranks[i] < 0 || ranks[i] >= children) fail("ranks: node ", i, " has rank ", ranks[i], " of ", children);
  }
}

int64_t GrowthShape::candidates(int64_t levels) const {
  if (ranks.empty()) return 1 + children + (levels - 1) * beam * children;
  return 1 + (std::upper_bound(depths.begin(), depths.end(), levels) - depths.begin());
}

DraftSizes sizes_of(const GrowthShape& shape, const GrowthLimits& limits, int64_t requests) {
  if (limits.deepest.shape[0] != requests) {
    fail("limits: expected ", requests, " numbers, one per request, got ", limits.deepest.shape[0]);
  }
  for (int64_t b = 0; b < requests; ++b) {
    if (limits.deepest.as<int32_t>()[b] < 0) fail("limits: entry ", b, " is negative");
  }
  const int64_t levels = limits.levels;
  if (levels < 1 || levels > kMaxNodes) fail("levels: expected 1 to ", kMaxNodes, ", got ", levels);
  const DraftSizes sizes{levels, shape.children, shape.beam};
  if (sizes.expanded() > kMaxNodes) {
    fail("levels: ", levels, " of beam=", shape.beam, " expand ", sizes.expanded(), " nodes, at most ", kMaxNodes,
         " are supported");
  }
  if (shape.candidates(levels) > kMaxCandidates) {
    fail("levels: ", levels, " of them have ", shape.candidates(levels), " candidates, at most ", kMaxCandidates,
         " are supported");
  }
  return sizes;
}

DraftedTrees grow(Network& network, const DraftInputs& inputs, const OptionalTensor& vocabulary,
                  const GrowthShape& shape, const GrowthLimits& limits, const DraftSizes& sizes) {
  const char* cause = inputs.hidden_states.given() ? "hidden_states" : "runs";
  const int64_t all = limits.levels * inputs.requests();
  Trees trees(inputs, vocabulary, shape, limits, sizes);
  TensorView logits = network.begin();
  const bool ahead = logits.shape[0] == all;  // those of all levels
  trees.read(logits, cause);
  if (!shape.ranks.empty()) {
    if (!ahead) fail("ranks: expected a network that knows all levels at once");
    trees.add_ranks();
    return trees.select();
  }
  trees.add();
  while (trees.levels() < limits.levels && trees.another_level_pays()) {
    if (!ahead) trees.read(network.step(trees.rows()), cause);
    trees.add();
  }
  return trees.select();
}

}  // namespace specengine
