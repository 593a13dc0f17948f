// Trees whose shape is known before their tokens: each node is the child of some rank, of a list that its level alone
// decides (Medusa's trees, chains).
#pragma once
#include "growth/nodes.h"

namespace specengine {

// Entry n is node n + 1. Entries that are no such tree give some node, but read and write nothing out of bounds.
struct RankShape {
  const int* ranks;    // [count] from 0
  const int* parents;  // [count] nodes before the entry's
  const int* depths;   // [count] from 1
  int count;

  // Writes a node but the root. Its score adds up from the root on.
  SPECENGINE_HOST_DEVICE void write(const GrownNodes& nodes, int node, const ChildLists& children, int levels) const {
    const int depth = depths[node - 1];
    float score = 0;
    for (int height = depth - 1; height >= 0; --height) {  // the root's child first
      int above = node;
      for (int up = 0; up < height && above > 0; ++up) above = parents[above - 1];
      if (above > 0) score += children.log_prob(list_of(above, levels), rank_of(above, children));
    }
    nodes.write(node, parents[node - 1], depth, rank_of(node, children), score);
  }

 private:
  SPECENGINE_HOST_DEVICE static int clamp(int x, int most) { return x < 0 ? 0 : x > most ? most : x; }
  SPECENGINE_HOST_DEVICE int list_of(int node, int levels) const { return clamp(depths[node - 1] - 1, levels - 1); }
  SPECENGINE_HOST_DEVICE int rank_of(int node, const ChildLists& children) const {
    return clamp(ranks[node - 1], children.count - 1);
  }
};

}  // namespace specengine
