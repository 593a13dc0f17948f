#include "growth/grow.h"

#include <stdexcept>

#include "growth/levels.h"
#include "growth/stop.h"
#include "ops/top_tokens.h"

namespace specengine {
namespace {

class Trees {
 public:
  Trees(const DraftInputs& inputs, const OptionalTensor& vocabulary, const GrowthShape& shape,
        const GrowthLimits& limits, const DraftSizes& sizes)
      : shape_(shape),
        limits_(limits),
        vocabulary_(vocabulary),
        widths_(shape.widths.begin(), shape.widths.end()),
        B_(inputs.requests()),
        C_(shape.candidates(limits.levels)),
        N_(std::min(shape.nodes, C_)),
        k_(sizes.children),
        beam_(sizes.beam),
        words_((sizes.expanded() + 31) / 32),
        roots_(own_.ints({B_, 1})),
        known_(own_.ints({B_})),
        row_start_(own_.ints({B_ + 1})),
        own_tokens_(own_.ints({B_ * beam_})),
        best_tokens_(own_.ints({B_ * sizes.expanded(), k_})),
        best_scores_(own_.floats({B_ * sizes.expanded(), k_})),
        candidates_{own_.ints({B_, C_}), own_.ints({B_, C_}), own_.ints({B_, C_}), own_.floats({B_, C_})},
        before_(rows(1)),
        after_(rows(1)) {
    const int64_t words = after_.ancestors.shape[1];
    std::fill_n(after_.beam.as<int32_t>(), B_, 0);
    std::fill_n(after_.ancestors.as<uint32_t>(), B_ * words, 0u);
    std::fill_n(candidates_.depths.as<int32_t>(), B_ * C_, -1);  // no candidate yet
    for (int64_t b = 0; b < B_; ++b) {
      roots_.as<int32_t>()[b] = inputs.tokens.as<int32_t>()[inputs.last.as<int32_t>()[b]], known_.as<int32_t>()[b] = 1;
      after_.ancestors.as<uint32_t>()[b * words] = 1;  // node 0 is the root
    }
    for (int64_t b = 0; b <= B_; ++b) row_start_.as<int32_t>()[b] = static_cast<int32_t>(b * beam_);
  }

  int64_t levels() const { return levels_; }  // grown

  // Reads logits of rows that come next.
  void read(const TensorView& logits, const char* cause) {
    const int64_t rows = logits.shape[0];
    try {
      run_cpu(TopTokens{logits, rows_of(best_tokens_, read_, rows), rows_of(best_scores_, read_, rows)});
    } catch (const std::invalid_argument& error) {  // the logits that it names are no argument of the caller
      fail(cause, ": level ", levels_, " has no distribution; ", error.what());
    }
    read_ += rows;
  }

  // Adds a level of what was read; chooses the rows that come next, none after the last level.
  void add() {
    const int64_t width = levels_ == 0 ? 1 : beam_, before = rows_before(levels_);
    before_ = after_, after_ = rows(levels_ + 1 == limits_.levels ? 0 : beam_);
    const auto part = [&](const TensorView& best) {
      return tensor(rows_of(best, B_ * before, 1).data, best.dtype, {B_ * width, 1, k_});
    };
    const TensorView none;
    const ExpandLevel op{{none, none, none, thresholds(), widths()},
                         {part(best_tokens_), part(best_scores_), none, none},
                         vocabulary_,
                         {},
                         roots_,
                         known_,
                         candidates_,
                         before_,
                         after_,
                         none,
                         1 + before * k_,
                         rows_before(levels_ + 1)};
    add_level(op, false);
    const int64_t next = after_.beam.shape[1];
    for (int64_t r = 0; r < B_ * next; ++r) {
      const int64_t entry = after_.beam.as<int32_t>()[r] - op.first;
      own_tokens_.as<int32_t>()[r] = op.parts.tokens.as<int32_t>()[r / next * width * k_ + entry];
    }
    ++levels_;
  }

  bool another_level_pays() const {
    return specengine::another_level_pays(candidates_, after_.beam, levels_, limits_.min_gain);
  }

  LevelRows rows() const {
    return {after_.tokens,       own_tokens_, after_.depths,
            after_.above,        row_start_,  beam_ == 1 ? OptionalTensor() : OptionalTensor(after_.ancestors),
            rows_before(levels_)};
  }

  // Adds the nodes of all levels, each the child of a rank.
  void add_ranks() {
    for (int64_t b = 0; b < B_; ++b) {
      int32_t *tokens = candidates_.tokens.as<int32_t>() + b * C_, *depths = candidates_.depths.as<int32_t>() + b * C_;
      int32_t* parents = candidates_.parents.as<int32_t>() + b * C_;
      float* scores = candidates_.scores.as<float>() + b * C_;
      tokens[0] = roots_.as<int32_t>()[b], parents[0] = -1, depths[0] = 0, scores[0] = 0.0f;
      for (int64_t i = 0; i + 1 < C_; ++i) {
        const int64_t at = place_of_rank(b, i);
        const int32_t token = best_tokens_.as<int32_t>()[at];
        tokens[1 + i] = vocabulary_.defined() ? vocabulary_.as<int32_t>()[token] : token;
        parents[1 + i] = static_cast<int32_t>(shape_.parents[i]);
        depths[1 + i] = static_cast<int32_t>(shape_.depths[i]);
        scores[1 + i] = scores[shape_.parents[i]] + best_scores_.as<float>()[at];
      }
    }
    levels_ = limits_.levels;
  }

  // Returns the best nodes of every request.
  DraftedTrees select() {
    int32_t* depths = candidates_.depths.as<int32_t>();
    for (int64_t i = 0; limits_.min_reach > 0 && i < B_ * C_; ++i) {  // a node reaches less than its parent
      const double score = candidates_.scores.as<float>()[i];
      if (depths[i] > 0 && std::exp(score) < limits_.min_reach) depths[i] = -1;
    }
    DraftedTrees trees{Ints(B_ * N_), Ints(B_ * N_), std::vector<double>(B_ * N_), Ints(B_), N_, levels_};
    const auto view = [&](Ints& x) { return tensor(x.data(), DType::kInt32, {B_, N_}); };
    const TensorView counts = tensor(trees.counts.data(), DType::kInt32, {B_});
    const TensorView kept = own_.ints({B_, N_}), bits = own_.ints({B_, N_, (N_ + 31) / 32});
    run_cpu(SelectNodes{candidates_.tokens, candidates_.parents, candidates_.depths, candidates_.scores,
                        limits_.deepest, view(trees.tokens), view(trees.parents), own_.ints({B_, N_}), kept, bits,
                        counts});
    for (int64_t b = 0; b < B_; ++b) {
      for (int64_t i = 0; i < trees.counts[b]; ++i) {
        const int64_t candidate = kept.as<int32_t>()[b * N_ + i];
        trees.chances[b * N_ + i] = i == 0 ? 1.0 : std::exp(static_cast<double>(log_prob(b, candidate)));
      }
    }
    return trees;
  }

 private:
  using Ints = std::vector<int32_t>;

  // Rows of a request in the levels before.
  int64_t rows_before(int64_t level) const { return level == 0 ? 0 : 1 + (level - 1) * beam_; }

  int64_t place_of_rank(int64_t b, int64_t node) const {
    return ((shape_.depths[node] - 1) * B_ + b) * k_ + shape_.ranks[node];
  }

  // Of a candidate given its parent.
  float log_prob(int64_t b, int64_t candidate) const {
    const float* scores = best_scores_.as<float>();
    if (!shape_.ranks.empty()) return scores[place_of_rank(b, candidate - 1)];
    const int64_t depth = candidates_.depths.as<int32_t>()[b * C_ + candidate], before = rows_before(depth - 1);
    return scores[(B_ * before + b * (depth == 1 ? 1 : beam_)) * k_ + candidate - 1 - before * k_];
  }

  // Room for the rows of a level, `width` of each request.
  BeamRows rows(int64_t width) {
    const int64_t R = B_ * width;
    return {own_.ints({B_, width}), own_.ints({R}), own_.ints({R}), own_.ints({R, words_}), own_.longs({R})};
  }

  OptionalTensor thresholds() const {
    if (widths_.empty()) return {};
    return tensor(const_cast<float*>(shape_.thresholds.data()), DType::kFloat32, {std::ssize(shape_.thresholds)});
  }
  OptionalTensor widths() {
    if (widths_.empty()) return {};
    return tensor(widths_.data(), DType::kInt32, {std::ssize(widths_)});
  }

  const GrowthShape& shape_;
  const GrowthLimits& limits_;
  const OptionalTensor& vocabulary_;
  Ints widths_;
  int64_t B_, C_, N_, k_, beam_, words_, levels_ = 0, read_ = 0;
  Scratch own_;
  TensorView roots_, known_, row_start_, own_tokens_;
  TensorView best_tokens_, best_scores_;  // children of every row that gave logits, level after level
  CandidateColumns candidates_;
  BeamRows before_, after_;  // of the last level
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
  while (trees.levels() < limits.levels && (ahead || trees.another_level_pays())) {  // levels ahead are paid for
    if (!ahead) trees.read(network.step(trees.rows()), cause);
    trees.add();
  }
  return trees.select();
}

}  // namespace specengine
