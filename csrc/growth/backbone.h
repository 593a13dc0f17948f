// The comb-shaped tree of FastEagle and CAPE: a level's likeliest token is the parent of the next level's.
#pragma once
#include "growth/nodes.h"
#include "growth/shapes.h"

namespace specengine {

// widths: how many nodes a level has.
struct Backbone {
  Widths widths;
  int* first;    // [levels] node of each level; before number() its width
  float* above;  // [levels] score of the level's parent

  // Turns the widths of the levels into their first nodes; returns the number of all nodes.
  SPECENGINE_HOST_DEVICE int number(const ChildLists& children, int levels) const {
    int count = 1;
    float score = 0;
    for (int level = 0; level < levels; ++level) {
      const int width = first[level];
      first[level] = count, above[level] = score;
      count += width, score += children.log_prob(level, 0);
    }
    return count;
  }

  // Writes a node but the root.
  SPECENGINE_HOST_DEVICE void write(const GrownNodes& nodes, int node, const ChildLists& children, int levels) const {
    int level = 0;
    while (level + 1 < levels && first[level + 1] <= node) ++level;
    const int rank = node - first[level];
    nodes.write(node, level == 0 ? 0 : first[level - 1], level + 1, rank,
                above[level] + children.log_prob(level, rank));
  }
};

}  // namespace specengine
