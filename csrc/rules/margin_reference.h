// Rule `margin` in mode `reference`: a copy of the public implementation of MARS, for comparisons.
// Temperature 0: `match`, without any margin. Above 0: if the two best tokens after temperature and filters are close,
// the rule follows the first child that is one of them. Else it tries children in order with min(1, target / draft),
// and a refused one loses only its own draft probability. That is lossless only for children sampled from the draft
// distribution. No theta makes this mode neutral. Negative scores count as close.
// Needs draft probabilities.
#pragma once
#include "rules/walk.h"

namespace specengine {

struct MarginReference {
  static constexpr Needs needs{.weights = true, .draft = true, .untempered = true, .leaders = true, .drawn = true};
  float theta;

  template <typename Rows>
  SPECENGINE_HOST_DEVICE Step step(Rows& rows, int node) const {
    const int exact = rows.drawn();
    if (rows.greedy()) return {rows.child_with(node, exact), exact};
    const auto [best, second] = rows.leaders();
    const float z1 = best.score / rows.temperature(), z2 = second.score / rows.temperature();
    const bool close = rows.allows(second.token) && z2 / (z1 + 1e-10f) > theta;
    for (int child = rows.first_child(node); child >= 0; child = rows.next_sibling(child)) {
      const int token = rows.token(child);
      if (close) {
        if (token == best.token || token == second.token) return {child, token, token != exact};
      } else {
        const double target_prob = rows.target_prob(token), draft_prob = rows.untempered_draft_prob(token);
        if (rows.accepts(child, target_prob / draft_prob)) return {child, token, token != exact};
        rows.lower(token, draft_prob);
      }
    }
    return {-1, rows.residual()};
  }
};

}  // namespace specengine
