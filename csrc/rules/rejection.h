// Rule `rejection` (speculative sampling; SpecInfer's and Sequoia's trees): a child is followed with probability
// min(1, target / draft); a refused one leaves norm(max(target - draft, 0)) for its siblings and the bonus token. If
// siblings were drawn without replacement, its token leaves the draft distribution. A child without a draft
// distribution is a certain proposal: refused, its token leaves the target's distribution. Guarantee: the output has
// the target's distribution. Needs children sampled from the draft distribution, or deterministic ones without any.
//
// Rule `lossy` (lenience, Leviathan et al. appendix A.5): min(1, target / ((1 - alpha) draft)), and
// norm(max(target / beta - draft, 0)) is left. Lossy; alpha = 0 with beta = 1 is `rejection` bit for bit.
#pragma once
#include "rules/walk.h"

namespace specengine {

// Tries the children of the loaded node in turn. exact_prob(token): the probability by which the exact rule would judge
// a child; a child that only this rule accepts counts as relaxed.
template <typename Rows, typename ExactProb>
SPECENGINE_HOST_DEVICE Step reject_in_turn(Rows& rows, int node, const ExactProb& exact_prob, double lenience = 1,
                                           double scale = 1) {
  const auto ratio = [](double target, double draft) { return draft > 0 ? target / draft : 1.0; };
  for (int child = rows.first_child(node); child >= 0; child = rows.next_sibling(child)) {
    const int token = rows.token(child);
    const double draft = rows.draft_prob(token);
    if (rows.accepts(child, ratio(rows.target_prob(token), draft * lenience))) {
      return {child, token, !rows.accepts(child, ratio(exact_prob(token), draft))};
    }
    rows.reject(child, scale);
  }
  return {-1, rows.residual()};
}

struct Rejection {
  static constexpr Needs needs{.weights = true, .draft = true};
  template <typename Rows>
  SPECENGINE_HOST_DEVICE Step step(Rows& rows, int node) const {
    return reject_in_turn(rows, node, [&](int token) { return rows.target_prob(token); });
  }
};

struct Lossy {
  static constexpr Needs needs{.weights = true, .draft = true};
  double lenience;  // 1 - alpha
  double scale;     // 1 / beta

  template <typename Rows>
  SPECENGINE_HOST_DEVICE Step step(Rows& rows, int node) const {
    return reject_in_turn(rows, node, [&](int token) { return rows.target_prob(token); }, lenience, scale);
  }
};

}  // namespace specengine
