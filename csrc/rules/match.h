// Rule `match`: draw the target's own token at the node and follow it if the tree has it as a child.
// Guarantee: the output is the target's, token for token, for every proposal: the drawn token depends on the seed and
// the position alone, never on the tree. Needs nothing of the drafter.
#pragma once
#include "rules/walk.h"

namespace specengine {

struct Match {
  static constexpr Needs needs{};

  template <typename Rows>
  SPECENGINE_HOST_DEVICE Step step(Rows& rows, int node) const {
    const int drawn = rows.drawn();
    return {rows.child_with(node, drawn), drawn};
  }
};

}  // namespace specengine
