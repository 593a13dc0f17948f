// Rule `margin` (MARS): if the target's two best tokens are close, the rule accepts either.
// Close: z2 / z1 > theta for the two largest scores before temperature and filters, both positive; the ratio has no
// meaning for other scores. Lossy; needs nothing of the drafter.
//   strict          Algorithm 1 of the paper: follow the best token, or the second if they are close; else emit the
//                   best. It never samples. theta = 1 is greedy decoding, so it equals `match` at temperature 0.
//   lossless base   Follow one of the two if they are close and the tree has it, else rule `match`. theta = 1 is
//                   `match` bit for bit.
#pragma once
#include "rules/walk.h"

namespace specengine {

struct Margin {
  static constexpr Needs needs{.leaders = true, .drawn = true};
  float theta;
  bool strict;

  template <typename Rows>
  SPECENGINE_HOST_DEVICE Step step(Rows& rows, int node) const {
    const auto [best, second] = rows.leaders();
    const bool close = best.score > 0 && second.score > 0 && second.score / best.score > theta;
    const int exact = strict ? best.token : rows.drawn();
    if (close) {
      for (int i = 0; i < 2; ++i) {
        const int token = i == 0 ? best.token : second.token;
        const int child = strict || rows.allows(token) ? rows.child_with(node, token) : -1;
        if (child >= 0) return {child, token, token != exact};
      }
    }
    return {rows.child_with(node, exact), exact};
  }
};

}  // namespace specengine
