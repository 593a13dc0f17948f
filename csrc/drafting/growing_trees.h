// The candidates of trees that grow level by level, and which of them are expanded next; draft_trees/dynamic.py has the
// same rules in PyTorch.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/passes/workspace.h"
#include "ops/draft_tree.h"
#include "ops/select_nodes.h"

namespace specengine {

// Candidate 0 is the root; then come its children, and level by level the children of the beam's nodes in their order.
class GrowingTrees {
 public:
  static int64_t candidates(const DraftTree& op) {
    return 1 + op.plan.top_k + (op.plan.levels - 1) * op.plan.beam * op.plan.top_k;
  }
  static int64_t expanded(const DraftTree& op) { return 1 + (op.plan.levels - 1) * op.plan.beam; }

  GrowingTrees(const DraftTree& op, Workspace& space)
      : op_(op),
        B_(op.plan.limits.shape[0]),
        N_(op.trees.tokens.shape[1]),
        C_(candidates(op)),
        words_((expanded(op) + 31) / 32),
        tokens_(space.ints({B_, C_})),
        parents_(space.ints({B_, C_})),
        depths_(space.ints({B_, C_})),
        scores_(space.floats({B_, C_})),
        log_probs_(space.floats({B_, C_})),
        beams_(space.ints({B_, op.plan.beam})),
        above_(space.ints({B_, op.plan.beam})),
        order_(space.ints({op.plan.beam * op.plan.top_k})),
        bits_(space.ints({B_, op.plan.beam, words_})),
        bits_above_(space.ints({B_, op.plan.beam, words_})),
        kept_(space.ints({B_, N_})),
        kept_depths_(space.ints({B_, N_})),
        kept_bits_(space.ints({B_, N_, (N_ + 31) / 32})) {}

  // roots: one token per request.
  void begin(const int32_t* roots) const {
    std::fill_n(depths_.as<int32_t>(), B_ * C_, -1);  // no candidate yet
    for (int64_t b = 0; b < B_; ++b) {
      put(b * C_, roots[b], -1, 0, 0, 0);
      beams_.as<int32_t>()[b * op_.plan.beam] = 0;
      uint32_t* bits = bits_.as<uint32_t>() + b * op_.plan.beam * words_;
      std::fill_n(bits, words_, 0u), bits[0] = 1;  // node 0 is the last true pair
    }
  }

  int64_t width() const { return width_; }    // nodes that were expanded last, or will be next
  int64_t levels() const { return levels_; }  // grown
  bool chain() const { return chain_; }       // one node of each level was expanded, and one will be next

  // Adds the children of the beam; then chooses the next beam.
  // tokens: [B * width, k] in rows of the head.  log_probs: [B * width, k].
  void add(const TensorView& tokens, const TensorView& log_probs) {
    const int64_t k = op_.plan.top_k, width = width_, first = end_;
    const int32_t* vocabulary = op_.weights->vocabulary.defined() ? op_.weights->vocabulary.as<int32_t>() : nullptr;
    ++levels_;
    end_ += width * k;
    width_ = std::min(op_.plan.beam, width * k);
    for (int64_t b = 0; b < B_; ++b) {
      for (int64_t j = 0; j < width * k; ++j) {
        const int64_t child = b * width * k + j;
        const int32_t token = tokens.as<int32_t>()[child], parent = beam(b)[j / k];
        const float log_prob = log_probs.as<float>()[child];
        put(b * C_ + first + j, vocabulary ? vocabulary[token] : token, parent, levels_,
            scores_.as<float>()[b * C_ + parent] + log_prob, log_prob);
      }
      choose(b, first, width * k);
    }
  }

  // See DraftTree.
  bool another_level_pays() {
    const double depth = static_cast<double>(levels_);
    double tokens = 0;  // that the next level is expected to add, the sum over the requests
    for (int64_t b = 0; b < B_; ++b) {
      double reached = 0;
      for (int64_t j = 0; j < width_; ++j) reached += reach(b, j);
      reached = std::min(reached, 1.0);  // the run goes through one of the nodes at most
      tokens += std::pow(reached, 1 + 1 / depth);
    }
    return !(tokens < op_.plan.min_level_tokens);
  }

  // Writes the rows of the beam, one after the other.
  // tokens, row_start, ancestors: as a pass takes them.  sources: the row of the level before that each one goes on.
  void open(int32_t* tokens, int32_t* sources, int32_t* row_start, uint32_t* ancestors, int64_t width_before) {
    std::swap(bits_, bits_above_);
    for (int64_t b = 0; b < B_; ++b) {
      row_start[b] = static_cast<int32_t>(b * width_);
      for (int64_t j = 0; j < width_; ++j) {
        const int64_t row = b * width_ + j, node = opened_ + j, above = above_.as<int32_t>()[b * op_.plan.beam + j];
        tokens[row] = tokens_.as<int32_t>()[b * C_ + beam(b)[j]];
        sources[row] = static_cast<int32_t>(b * width_before + above);
        uint32_t* own = bits_.as<uint32_t>() + (b * op_.plan.beam + j) * words_;
        std::copy_n(bits_above_.as<uint32_t>() + (b * op_.plan.beam + above) * words_, words_, own);
        own[node / 32] |= 1u << node % 32;
        std::copy_n(own, words_, ancestors + row * words_);
      }
    }
    row_start[B_] = static_cast<int32_t>(B_ * width_);
    opened_ += width_;
    chain_ = chain_ && width_ == 1;
  }

  int64_t opened() const { return opened_; }  // rows of each request that were expanded
  int64_t words() const { return words_; }

  // Writes the best nodes of every request.
  void select() const {
    int32_t* depths = depths_.as<int32_t>();
    for (int64_t i = 0; op_.plan.min_reach > 0 && i < B_ * C_;
         ++i) {  // a node reaches less than its parent: parents stay
      if (depths[i] > 0 && std::exp(static_cast<double>(scores_.as<float>()[i])) < op_.plan.min_reach) depths[i] = -1;
    }
    run_cpu(SelectNodes{tokens_, parents_, depths_, scores_, op_.plan.limits, op_.trees.tokens, op_.trees.parents,
                        kept_depths_, kept_, kept_bits_, op_.trees.node_counts});
    for (int64_t b = 0; b < B_; ++b) {
      for (int64_t i = 0; i < op_.trees.node_counts.as<int32_t>()[b]; ++i) {
        const int32_t candidate = kept_.as<int32_t>()[b * N_ + i];
        op_.trees.chances.as<float>()[b * N_ + i] = std::exp(log_probs_.as<float>()[b * C_ + candidate]);
      }
    }
    std::fill_n(op_.trees.levels.as<int32_t>(), B_, static_cast<int32_t>(levels_));
  }

 private:
  int32_t* beam(int64_t b) const { return beams_.as<int32_t>() + b * op_.plan.beam; }
  double reach(int64_t b, int64_t j) const {
    return std::exp(static_cast<double>(scores_.as<float>()[b * C_ + beam(b)[j]]));
  }

  void put(int64_t at, int32_t token, int32_t parent, int64_t depth, float score, float log_prob) const {
    tokens_.as<int32_t>()[at] = token, parents_.as<int32_t>()[at] = parent;
    depths_.as<int32_t>()[at] = static_cast<int32_t>(depth);
    scores_.as<float>()[at] = score, log_probs_.as<float>()[at] = log_prob;
  }

  // Of a level's `count` candidates from `first` on, the likeliest ones become the beam; of equals the earlier one.
  void choose(int64_t b, int64_t first, int64_t count) const {
    int32_t* order = order_.as<int32_t>();
    const float* score = scores_.as<float>() + b * C_ + first;
    std::iota(order, order + count, 0);
    std::partial_sort(order, order + width_, order + count,
                      [&](int32_t x, int32_t y) { return score[x] != score[y] ? score[x] > score[y] : x < y; });
    for (int64_t j = 0; j < width_; ++j) {
      beam(b)[j] = static_cast<int32_t>(first) + order[j];
      above_.as<int32_t>()[b * op_.plan.beam + j] = order[j] / static_cast<int32_t>(op_.plan.top_k);
    }
  }

  const DraftTree& op_;
  int64_t B_, N_, C_, words_;
  TensorView tokens_, parents_, depths_, scores_, log_probs_;  // [B, C]
  TensorView beams_, above_;  // [B, beam]: candidates that are expanded next, and their parents' places in the old beam
  TensorView order_;          // [beam * k]
  TensorView bits_, bits_above_;  // [B, beam, words]: expanded nodes on the path to each of the beam's nodes
  TensorView kept_, kept_depths_, kept_bits_;
  int64_t width_ = 1, levels_ = 0, end_ = 1, opened_ = 1;
  bool chain_ = true;
};

}  // namespace specengine
