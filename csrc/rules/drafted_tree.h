// One request's tree for a rule: node 0 is the root, every other node's parent is an earlier node. A node that its
// parent's mask forbids is no child: no rule sees it, so a tree means the same whether such nodes were cut or not.
#pragma once
#include "base/token_mask.h"

namespace specengine {

struct DraftedTree {
  const int* tokens;
  const int* parents;
  int count;
  TokenMasks masks;

  SPECENGINE_HOST_DEVICE int nodes() const { return count; }
  SPECENGINE_HOST_DEVICE int token(int node) const { return tokens[node]; }
  SPECENGINE_HOST_DEVICE int parent(int node) const { return parents[node]; }
  SPECENGINE_HOST_DEVICE int depth(int node) const {
    int above = 0;
    for (; node > 0; node = parents[node]) ++above;
    return above;
  }

  // These return -1 if there is no such node.
  SPECENGINE_HOST_DEVICE int first_child(int node) const { return child_from(node, node + 1); }
  SPECENGINE_HOST_DEVICE int next_sibling(int node) const { return child_from(parents[node], node + 1); }
  SPECENGINE_HOST_DEVICE int child_with(int node, int wanted) const {
    int child = first_child(node);
    while (child >= 0 && tokens[child] != wanted) child = next_sibling(child);
    return child;
  }

 private:
  SPECENGINE_HOST_DEVICE int child_from(int node, int first) const {
    for (int child = first; child < count; ++child) {
      if (parents[child] == node && is_allowed(masks.row(node), tokens[child])) return child;
    }
    return -1;
  }
};

}  // namespace specengine
