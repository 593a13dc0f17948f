// The nodes of a tree while it grows, and the children that they may have.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace specengine {

// Lists of children, likeliest first, `count` each.
struct ChildLists {
  const int* tokens;
  const float* log_probs;
  int64_t stride;  // from one list to the next
  int count;

  SPECENGINE_HOST_DEVICE int token(int list, int rank) const { return tokens[list * stride + rank]; }
  SPECENGINE_HOST_DEVICE float log_prob(int list, int rank) const { return log_probs[list * stride + rank]; }
};

// Node 0 is the root; parents come before their children. ranks: of the token among the parent's children.
// scores: log-probabilities added up from the root on.
struct GrownNodes {
  int *parents, *depths, *ranks;
  double* scores;

  SPECENGINE_HOST_DEVICE void write(int node, int parent, int depth, int rank, double score) const {
    parents[node] = parent, depths[node] = depth, ranks[node] = rank, scores[node] = score;
  }
};

}  // namespace specengine
