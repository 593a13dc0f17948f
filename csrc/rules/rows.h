// A rule's view of one request: its tree, and the distributions at the node loaded last.
//
// A distribution is a row of integer weights: the order of a sum does not matter, so CPU and CUDA decide alike. A
// Sampler runs the loops over the vocabulary: one thread on the CPU (cpu/thread_sampler.h), a block on CUDA
// (cuda/sampling/block_sampler.cuh), whose threads all run the rule and get the same answers. A Sampler has
//   load(logits, index, tree, node, mask, needs, untempered)  shapes a row; false: it is no distribution. mask: the
//                                                tokens that it allows. untempered: where its weights without
//                                                temperature and filters go, if they are needed.
//   draw()  leaders()  temperature()  allows(token)  entropy()  untempered_total()  top_token()    of that row
//   weigh(weights)  weight(token)                its weights, or that of one token
//   sum(f)  best(begin, end, f)                  sum of f(token); the first index of the largest f, -1 if all are -inf
//   once(f)                                      one thread calls f(), all see what it has written
//   uniform(node)                                the number that decides on a node
//   draw_by_weight(weights)                      a token, with the noise of draw()
#pragma once
#include "base/draw_arithmetic.h"
#include "rules/drafted_tree.h"
#include "rules/walk.h"

namespace specengine {

struct TokenScore {
  int token;
  float score;
};
struct Leaders {
  TokenScore best, second;
};

// Rows of logits of one request. draft_rows: the row of a node in draft_logits, or -1.
struct LogitRows {
  const float* target;     // [N, V]
  const float* draft;      // [R, C]; nullptr: nothing was drafted from a distribution
  const int* draft_rows;   // [N]
  const int* draft_index;  // [V]; nullptr: columns are tokens
  int64_t vocab, columns;
  bool replacement;
};

// How a rule changes weights, the same on both devices.
struct WeightArithmetic {
  static constexpr double kUnit = 0x1p61;              // of weights that were probabilities: all together fit 63 bits
  static constexpr uint64_t kOne = uint64_t{1} << 40;  // the weight of the best score

  SPECENGINE_HOST_DEVICE static double share(uint64_t weight, uint64_t total) {
    return static_cast<double>(weight) / static_cast<double>(total);
  }
  SPECENGINE_HOST_DEVICE static uint64_t unit(double probability) {
    return probability > 0 ? static_cast<uint64_t>(probability * kUnit) : 0;
  }
  // What a weight has left behind a refusal.
  SPECENGINE_HOST_DEVICE static uint64_t left(uint64_t target, uint64_t draft, double target_scale,
                                              double draft_scale) {
    return unit(product(target_scale, static_cast<double>(target)) - product(draft_scale, static_cast<double>(draft)));
  }
  // Of a mixture; kept: whether the draft's part counts.
  SPECENGINE_HOST_DEVICE static uint64_t mixed(uint64_t target, uint64_t draft, bool kept, double draft_scale,
                                               double rest) {
    const double own = kept ? product(draft_scale, static_cast<double>(draft)) : 0.0;
    return unit(own + product(rest, static_cast<double>(target)));
  }
};

template <typename Sampler>
class Rows : public DraftedTree, protected WeightArithmetic {
 public:
  // weights: uint64 [4, V], workspace. values, marks: [N], a rule's notes on nodes. logits and sampler must stay.
  SPECENGINE_HOST_DEVICE Rows(const DraftedTree& tree, const LogitRows& logits, Sampler& sampler, uint64_t* weights,
                              double* values, int* marks)
      : DraftedTree(tree), logits_(logits), sampler_(sampler), weights_(weights), values_(values), marks_(marks) {}

  // Loads a node; false if its scores are no distribution, which ends the walk.
  SPECENGINE_HOST_DEVICE bool load(int node, const Needs& needs) {
    loaded_ = node, changed_ = false;
    has_draft_ = needs.draft && logits_.draft != nullptr && logits_.draft_rows[node] >= 0;
    if (has_draft_) {
      const float* row = logits_.draft + logits_.draft_rows[node] * logits_.columns;
      if (!sampler_.load(row, logits_.draft_index, *this, node, nullptr, needs, untempered_draft())) return false;
      draft_total_ = sampler_.weigh(draft());
      untempered_draft_total_ = sampler_.untempered_total(), draft_top_token_ = sampler_.top_token();
      draft_top_weight_ = kOne;
      if (masks.row(node) != nullptr) has_draft_ = mask_draft(masks.row(node), needs);
    }
    const float* row = logits_.target + node * logits_.vocab;
    if (!sampler_.load(row, nullptr, *this, node, masks.row(node), needs, untempered_target())) return false;
    if (needs.weights) target_total_ = processed_total_ = sampler_.weigh(target());
    untempered_target_total_ = sampler_.untempered_total();
    return true;
  }
  SPECENGINE_HOST_DEVICE int loaded() const { return loaded_; }

  // These read the target's row as the sampling parameters shape it.
  SPECENGINE_HOST_DEVICE int drawn() const { return sampler_.draw(); }
  SPECENGINE_HOST_DEVICE Leaders leaders() const { return sampler_.leaders(); }
  SPECENGINE_HOST_DEVICE float temperature() const { return sampler_.temperature(); }
  SPECENGINE_HOST_DEVICE bool greedy() const { return sampler_.temperature() == 0.0f; }
  SPECENGINE_HOST_DEVICE bool allows(int token) const { return sampler_.allows(token); }
  SPECENGINE_HOST_DEVICE double entropy() const { return sampler_.entropy(); }
  SPECENGINE_HOST_DEVICE double processed_prob(int token) const {
    return share(sampler_.weight(token), processed_total_);
  }

  // These read the two distributions as the rule has left them.
  SPECENGINE_HOST_DEVICE double target_prob(int token) const { return share(target()[token], target_total_); }
  SPECENGINE_HOST_DEVICE bool has_draft() const { return has_draft_; }
  SPECENGINE_HOST_DEVICE double draft_prob(int token) const {  // a child drawn from no distribution is certain
    return has_draft_ ? share(draft()[token], draft_total_) : 1.0;
  }
  SPECENGINE_HOST_DEVICE bool changed() const { return changed_; }
  SPECENGINE_HOST_DEVICE int residual() { return changed_ ? sampler_.draw_by_weight(target()) : sampler_.draw(); }

  // These read the distributions without temperature and filters.
  SPECENGINE_HOST_DEVICE double untempered_target_prob(int token) const {
    return share(untempered_target()[token], untempered_target_total_);
  }
  SPECENGINE_HOST_DEVICE double untempered_draft_prob(int token) const {
    return has_draft_ ? share(untempered_draft()[token], untempered_draft_total_) : 1.0;
  }
  SPECENGINE_HOST_DEVICE double untempered_target_top() const { return share(kOne, untempered_target_total_); }
  SPECENGINE_HOST_DEVICE double untempered_draft_top() const {
    return share(draft_top_weight_, untempered_draft_total_);
  }
  SPECENGINE_HOST_DEVICE int draft_top_token() const { return draft_top_token_; }

  // Whether the node's uniform number is at most a probability.
  SPECENGINE_HOST_DEVICE bool accepts(int node, double probability) const {
    return sampler_.uniform(node) <= probability;
  }

  // Refuses a child: target becomes norm(max(scale * target - draft, 0)), and the draft distribution
  // loses the token where siblings were drawn without replacement. Returns the mass before normalising; if it is 0
  // the target stays as it was, because no token will be drawn from it.
  SPECENGINE_HOST_DEVICE double reject(int child, double scale) {
    const int token = tokens[child];
    changed_ = true;
    if (!has_draft_) {  // the draft distribution is the token
      const uint64_t weight = target()[token], rest = target_total_ - weight;
      if (rest == 0) return 0;
      sampler_.once([&] { target()[token] = 0; });
      const double mass = scale * share(rest, target_total_);
      target_total_ = rest;
      return mass;
    }
    const double most = scale > 1 ? scale : 1.0;  // both are divided by it: weights of more than kUnit may not fit
    const double target_scale = scale / most / static_cast<double>(target_total_);
    const double draft_scale = 1.0 / most / static_cast<double>(draft_total_);
    const uint64_t mass = sampler_.sum([&](int64_t v) { return excess(v, target_scale, draft_scale); });
    if (mass > 0) {
      target_total_ = sampler_.sum([&](int64_t v) { return target()[v] = excess(v, target_scale, draft_scale); });
    }
    if (!logits_.replacement) {
      draft_total_ -= draft()[token];
      sampler_.once([&] { draft()[token] = 0; });
    }
    return static_cast<double>(mass) / kUnit * most;
  }

  // Lowers the probability of one token of the target, at most to 0, and renormalises.
  SPECENGINE_HOST_DEVICE void lower(int token, double by) {
    const double left = target_prob(token) - by;
    const uint64_t weight = left > 0 ? static_cast<uint64_t>(left * static_cast<double>(target_total_)) : 0;
    const uint64_t total = target_total_ - target()[token] + weight;
    if (total == 0) return;
    sampler_.once([&] { target()[token] = weight; });
    target_total_ = total, changed_ = true;
  }

  // Half the L1 distance of the two.
  SPECENGINE_HOST_DEVICE double distance() const {
    const double target_scale = 1.0 / static_cast<double>(target_total_);
    const double draft_scale = 1.0 / static_cast<double>(draft_total_);
    return static_cast<double>(sampler_.sum([&](int64_t v) {
             return unit(product(draft_scale, static_cast<double>(draft()[v])) -
                         product(target_scale, static_cast<double>(target()[v])));
           })) /
           kUnit;
  }

  // The target becomes the draft distribution.
  SPECENGINE_HOST_DEVICE void keep_draft() {
    target_total_ = sampler_.sum([&](int64_t v) { return target()[v] = draft()[v]; });
    changed_ = true;
  }

  // The target becomes draft * [kept] + (1 - sum of draft * [kept]) * target. kept: tokens to which one of the two
  // gives at least a probability without temperature and filters.
  SPECENGINE_HOST_DEVICE void mix(Side judge, double least) {
    const auto kept = [&](int token) {
      return (judge == Side::kDraft ? untempered_draft_prob(token) : untempered_target_prob(token)) >= least;
    };
    const uint64_t trusted = sampler_.sum([&](int64_t v) { return kept(static_cast<int>(v)) ? draft()[v] : 0; });
    if (trusted == 0) return;
    const double draft_scale = 1.0 / static_cast<double>(draft_total_);
    const double rest = share(draft_total_ - trusted, draft_total_) / static_cast<double>(target_total_);
    target_total_ = sampler_.sum([&](int64_t v) {
      return target()[v] = mixed(target()[v], draft()[v], kept(static_cast<int>(v)), draft_scale, rest);
    });
    changed_ = true;
  }

  SPECENGINE_HOST_DEVICE void note(int node, double value, int mark) {
    sampler_.once([&] { values_[node] = value, marks_[node] = mark; });
  }
  SPECENGINE_HOST_DEVICE double value(int node) const { return values_[node]; }
  SPECENGINE_HOST_DEVICE int mark(int node) const { return marks_[node]; }

 private:
  // Takes the forbidden tokens out of the distribution that the drafter drew from: the children that are left are draws
  // from the rest. Returns whether there is a rest; without one no child was drawn from it.
  SPECENGINE_HOST_DEVICE bool mask_draft(const uint32_t* mask, const Needs& needs) {
    draft_total_ = keep_allowed(draft(), mask);
    if (draft_total_ == 0 || !needs.untempered) return draft_total_ > 0;
    untempered_draft_total_ = keep_allowed(untempered_draft(), mask);
    if (untempered_draft_total_ == 0) return false;
    if (!is_allowed(mask, draft_top_token_)) {
      draft_top_token_ = static_cast<int>(
          sampler_.best(0, logits_.vocab, [&](int64_t v) { return static_cast<double>(untempered_draft()[v]); }));
      draft_top_weight_ = untempered_draft()[draft_top_token_];
    }
    return true;
  }
  SPECENGINE_HOST_DEVICE uint64_t keep_allowed(uint64_t* weights, const uint32_t* mask) {
    return sampler_.sum([=](int64_t v) { return weights[v] = is_allowed(mask, v) ? weights[v] : 0; });
  }

  // Four planes behind one pointer, which a thread can keep in a register through a walk.
  SPECENGINE_HOST_DEVICE uint64_t* target() const { return weights_; }
  SPECENGINE_HOST_DEVICE uint64_t* draft() const { return weights_ + logits_.vocab; }
  SPECENGINE_HOST_DEVICE uint64_t* untempered_target() const { return weights_ + 2 * logits_.vocab; }
  SPECENGINE_HOST_DEVICE uint64_t* untempered_draft() const { return weights_ + 3 * logits_.vocab; }

  SPECENGINE_HOST_DEVICE uint64_t excess(int64_t v, double target_scale, double draft_scale) const {
    return left(target()[v], draft()[v], target_scale, draft_scale);
  }

  const LogitRows& logits_;
  Sampler& sampler_;
  uint64_t* weights_;
  double* values_;
  int* marks_;
  uint64_t target_total_ = 1, processed_total_ = 1, draft_total_ = 1;
  uint64_t untempered_target_total_ = 1, untempered_draft_total_ = 1, draft_top_weight_ = kOne;
  int loaded_ = -1, draft_top_token_ = -1;
  bool has_draft_ = false, changed_ = false;
};

// Draws a token from a row of weights; -1 if all are 0. Two levels of noise, as in every draw.
template <typename Sampler>
SPECENGINE_HOST_DEVICE int draw_by_weight(const Sampler& sampler, const uint64_t* weights, int64_t vocab, uint64_t seed,
                                          uint32_t position, NoiseStream blocks, NoiseStream tokens,
                                          uint32_t salt = 0) {
  const auto value = [&](uint64_t weight, int64_t index, NoiseStream stream) {
    if (weight == 0) return static_cast<double>(-INFINITY);
    return std::log(static_cast<double>(weight)) + gumbel(seed, position, static_cast<uint32_t>(index), stream, salt);
  };
  const int64_t block = sampler.best(0, (vocab + kNoiseBlock - 1) / kNoiseBlock, [&](int64_t i) {
    uint64_t total = 0;
    for (int64_t v = i * kNoiseBlock; v < vocab && v < (i + 1) * kNoiseBlock; ++v) total += weights[v];
    return value(total, i, blocks);
  });
  if (block < 0) return kNoToken;
  const int64_t first = block * kNoiseBlock, end = first + kNoiseBlock < vocab ? first + kNoiseBlock : vocab;
  return static_cast<int>(sampler.best(first, end, [&](int64_t v) { return value(weights[v], v, tokens); }));
}

}  // namespace specengine
