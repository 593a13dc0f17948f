// One request's tree for a rule: node 0 is the root, every other node's parent is an earlier node.
#pragma once
#include "base/host_device.h"

namespace specengine {

struct DraftedTree {
  const int* tokens;
  const int* parents;
  int count;

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
      if (parents[child] == node) return child;
    }
    return -1;
  }
};

}  // namespace specengine
