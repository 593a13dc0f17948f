// Rule `match`: draw the target's own token at the node and follow it if the tree has it as a child.
// Guarantee: the output is the target's, token for token, for every proposal: the drawn token depends on the seed and
// the position alone, never on the tree. Needs nothing of the drafter.
//
// Match::step decides on both devices; the loops around it differ.
//
// CPU: cpu/verify_tree.cpp walks from the root (rules/walk.h) and draws at the nodes it visits (cpu/thread_sampler.h).
//
// CUDA: cuda/sampling/verify_tree.cu draws at every node (cuda/sampling/shaped_row.cuh), decides at every node with
// KnownTokens, and then follows the decisions from the root.
//
// A draw's noise has two levels (base/draw_arithmetic.h) of Philox numbers (base/philox.h): the first is keyed (seed,
// position, block of 64 tokens), the second (seed, position, token).
#pragma once
#include <cstdint>

#include "base/draw_arithmetic.h"
#include "rules/drafted_tree.h"
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

// The rows of a tree whose target tokens are drawn already; all that `match` asks of rows.
struct KnownTokens : DraftedTree {
  const int* known;  // kNoToken: the node's scores are no distribution
  int node = 0;

  SPECENGINE_HOST_DEVICE bool load(int at, const Needs&) {
    node = at;
    return known[node] != kNoToken;
  }
  SPECENGINE_HOST_DEVICE int drawn() const { return known[node]; }
};

}  // namespace specengine
