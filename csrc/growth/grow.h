// The one loop that drafts trees by a network on the CPU, level by level: after a target's pass Python's memory is
// cold, and an op takes some tens of microseconds, less than a call from Python would.
#pragma once
#include <vector>

#include "networks/network.h"
#include "ops/select_nodes.h"

namespace specengine {

// What all trees of a drafter have in common, checked once.
//
// A level expands the `beam` likeliest nodes of the level before, `children` each; a beam of 1 is a backbone with
// leaves. With widths (CAPE), a node has widths[number of thresholds below its likeliest child's probability] children.
// Or every node is the child of some rank, of a distribution that its level alone decides: Medusa's trees.
struct GrowthShape {
  int64_t children;
  int64_t beam;
  int64_t nodes;                  // of a tree at most, the likeliest ones; the root is one
  std::vector<float> thresholds;  // ascending
  std::vector<int64_t> widths;    // one more than thresholds, or none
  std::vector<int64_t> parents;   // of ranked nodes, of which node i is number 1 + i: before it, 0 is the root
  std::vector<int64_t> depths;    // of ranked nodes, from 1, rising
  std::vector<int64_t> ranks;     // of ranked nodes, from 0

  void validate() const;
  // Candidates of trees of so many levels, the root among them.
  int64_t candidates(int64_t levels) const;
};

// Where a draft ends.
struct GrowthLimits {
  TensorView deepest;  // [B] int32, deepest level of each request's tree
  int64_t levels;      // at most
  float min_gain;      // a further level must be expected to add so many tokens, see growth/stop.h
  float min_reach;     // nodes that the text reaches with less probability are left out
};

// B trees of at most N nodes, in the target's tokens: the root, then level by level.
struct DraftedTrees {
  std::vector<int32_t> tokens, parents;  // [B, N]; entries past a tree's count have no meaning
  std::vector<double> chances;           // [B, N], the probability of a node given its parent; 1 of the root
  std::vector<int32_t> counts;           // [B]
  int64_t nodes = 0, levels = 0;         // N, and the number of drafted levels
};

// Checks what a draft is asked for; returns the sizes with which its network is opened.
DraftSizes sizes_of(const GrowthShape& shape, const GrowthLimits& limits, int64_t requests);

// Drafts. sizes: with which the network was opened.  vocabulary: [Vd] int32, the target's token of each of the
// network's; None: the same.
DraftedTrees grow(Network& network, const DraftInputs& inputs, const OptionalTensor& vocabulary,
                  const GrowthShape& shape, const GrowthLimits& limits, const DraftSizes& sizes);

}  // namespace specengine
