// Rows in double precision whose coins and draws are forks. A rule that walks over them once per combination of
// branches yields its exact law.
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "rules/drafted_tree.h"
#include "rules/rows.h"
#include "rules/walk.h"

namespace specengine {

using Probs = std::vector<double>;

// The forks of one run after the other, until every combination of branches has been taken.
class Forks {
 public:
  // The branch that this run takes; chances sum to 1, and a branch of chance 0 is never taken.
  int take(const Probs& chances) {
    if (at_ == forks_.size()) forks_.push_back({-1, chances}), forks_.back().advance();
    const Fork& fork = forks_[at_++];
    probability_ *= fork.chances[fork.taken];
    return fork.taken;
  }
  double probability() const { return probability_; }
  bool next_run() {
    at_ = 0, probability_ = 1;
    while (!forks_.empty() && !forks_.back().advance()) forks_.pop_back();
    return !forks_.empty();
  }

 private:
  struct Fork {
    int taken;
    Probs chances;
    bool advance() {
      do ++taken;
      while (taken < static_cast<int>(chances.size()) && !(chances[taken] > 0));
      return taken < static_cast<int>(chances.size());
    }
  };
  std::vector<Fork> forks_;
  size_t at_ = 0;
  double probability_ = 1;
};

// A token's score is its log-probability plus this, so that some scores are positive and some are not.
constexpr double kScoreShift = 2;

// The interface of Rows, at temperature 1 and without filters.
class ExactRows : public DraftedTree {
 public:
  // target, draft: the distributions of every node; an empty draft: the node's children were drawn from no
  // distribution. residual_kept: a planted bug, for negative controls: a refused child leaves the target as it is.
  ExactRows(const DraftedTree& tree, const std::vector<Probs>& target, const std::vector<Probs>& draft,
            bool replacement, bool residual_kept, Forks& forks)
      : DraftedTree(tree),
        given_target_(target),
        given_draft_(draft),
        replacement_(replacement),
        residual_kept_(residual_kept),
        forks_(forks) {}

  bool load(int node, const Needs&) {
    loaded_ = node, changed_ = false;
    target_ = given_target_[node], draft_ = given_draft_[node];
    return true;
  }
  int loaded() const { return loaded_; }

  int drawn() {
    const auto [entry, fresh] = drawn_.try_emplace(loaded_, kNoToken);
    if (fresh) entry->second = forks_.take(given_target_[loaded_]);
    return entry->second;
  }
  bool greedy() const { return false; }
  float temperature() const { return 1; }
  bool allows(int token) const { return given_target_[loaded_][token] > 0; }
  Leaders leaders() const {
    Probs probs = given_target_[loaded_];
    const auto next = [&] {
      const auto best = std::max_element(probs.begin(), probs.end());
      const TokenScore leader{static_cast<int>(best - probs.begin()),
                              static_cast<float>(std::log(*best) + kScoreShift)};
      *best = -1;
      return leader;
    };
    const TokenScore best = next();
    return {best, next()};
  }
  double processed_prob(int token) const { return given_target_[loaded_][token]; }
  double entropy() const {
    double sum = 0;
    for (const double prob : given_target_[loaded_]) sum -= prob > 0 ? prob * std::log(prob) : 0;
    return sum;
  }

  double target_prob(int token) const { return target_[token]; }
  bool has_draft() const { return !given_draft_[loaded_].empty(); }
  double draft_prob(int token) const { return has_draft() ? draft_[token] : 1.0; }
  bool changed() const { return changed_; }
  int residual() { return changed_ ? forks_.take(target_) : drawn(); }

  double untempered_target_prob(int token) const { return given_target_[loaded_][token]; }
  double untempered_draft_prob(int token) const { return has_draft() ? given_draft_[loaded_][token] : 1.0; }
  double untempered_target_top() const { return *top(given_target_[loaded_]); }
  double untempered_draft_top() const { return *top(given_draft_[loaded_]); }
  int draft_top_token() const {
    const Probs& draft = given_draft_[loaded_];
    return static_cast<int>(top(draft) - draft.begin());
  }

  // A node has one coin: what it has shown of its number binds it in the rest of the run.
  bool accepts(int node, double probability) {
    auto& [low, high] = coins_.try_emplace(node, 0.0, 1.0).first->second;
    if (probability >= high) return true;
    if (probability <= low) return false;
    const double below = (probability - low) / (high - low);
    const bool accepted = forks_.take({below, 1 - below}) == 0;
    (accepted ? high : low) = probability;
    return accepted;
  }

  double reject(int child, double scale) {
    const int token = tokens[child];
    Probs refused = draft_, left(target_.size());
    if (!has_draft()) refused = Probs(target_.size()), refused[token] = std::max(scale * target_[token], 1.0);
    for (size_t v = 0; v < left.size(); ++v) left[v] = std::max(scale * target_[v] - refused[v], 0.0);
    const double mass = normalise(left);
    if (mass > 0 && !residual_kept_) target_ = left, changed_ = true;
    if (has_draft() && !replacement_) {
      draft_[token] = 0;
      normalise(draft_);
    }
    return mass;
  }

  void lower(int token, double by) {
    Probs left = target_;
    left[token] = std::max(left[token] - by, 0.0);
    if (normalise(left) > 0) target_ = left, changed_ = true;
  }

  double distance() const {
    double sum = 0;
    for (size_t v = 0; v < target_.size(); ++v) sum += std::max(draft_[v] - target_[v], 0.0);
    return sum;
  }
  void keep_draft() { target_ = draft_, changed_ = true; }
  void mix(Side judge, double least) {
    const auto kept = [&](int token) {
      return (judge == Side::kDraft ? untempered_draft_prob(token) : untempered_target_prob(token)) >= least;
    };
    double trusted = 0;
    for (size_t v = 0; v < draft_.size(); ++v) trusted += kept(static_cast<int>(v)) ? draft_[v] : 0;
    for (size_t v = 0; v < draft_.size(); ++v) {
      target_[v] = (kept(static_cast<int>(v)) ? draft_[v] : 0) + (1 - trusted) * target_[v];
    }
    changed_ = true;
  }

  void note(int node, double value, int mark) { notes_[node] = {value, mark}; }
  double value(int node) const { return notes_.at(node).first; }
  int mark(int node) const { return notes_.at(node).second; }

 private:
  static Probs::const_iterator top(const Probs& probs) { return std::max_element(probs.begin(), probs.end()); }
  static double normalise(Probs& probs) {
    double sum = 0;
    for (const double prob : probs) sum += prob;
    for (double& prob : probs) prob = sum > 0 ? prob / sum : prob;
    return sum;
  }

  const std::vector<Probs>&given_target_, &given_draft_;
  bool replacement_, residual_kept_;
  Forks& forks_;
  Probs target_, draft_;
  int loaded_ = -1;
  bool changed_ = false;
  std::map<int, int> drawn_;
  std::map<int, std::pair<double, double>> coins_;
  std::map<int, std::pair<double, int>> notes_;
};

}  // namespace specengine
