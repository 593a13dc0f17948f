// Rule `match`: draw the target's own token at the node and follow it if the tree has it as a child.
// Guarantee: the output is the target's, token for token, for every proposal: the drawn token depends on the seed and
// the position alone, never on the tree. Needs nothing of the drafter.
#pragma once
#include "base/host_device.h"

namespace specengine {

struct MatchRule {
  // Where the walk goes from `node`: a child to follow, or -1 and the token that ends the walk.
  struct Step {
    int child;
    int token;
  };

  // tokens and parents are those of one sequence's tree of `nodes` nodes.
  SPECENGINE_HOST_DEVICE static Step step(int drawn, int node, const int* tokens, const int* parents, int nodes) {
    for (int child = node + 1; child < nodes; ++child) {
      if (parents[child] == node && tokens[child] == drawn) return {child, drawn};
    }
    return {-1, drawn};
  }
};

}  // namespace specengine
