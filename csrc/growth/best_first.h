// Trees that grow from the likeliest node on: DDTree's and JetSpec's. Each node has at most one entry among those that
// compete: in a ddtree the next of its children, which becomes a node and is opened; in JetSpec's trees itself, and
// once it is opened it gets all its children at once.
#pragma once
#include <cmath>

#include "growth/nodes.h"

namespace specengine {

enum class BestFirstKind : int { kDdtree, kJetspec, kTop2gap };

constexpr double kExpectedGap = 1.0;  // log-probability by which top2gap expects the first child to be ahead

// How many children JetSpec's top2gap keeps of `count`. gap: between the first two log-probabilities.
SPECENGINE_HOST_DEVICE inline int fanned(int count, double gap, double beta) {
  const double steps = beta * (gap - kExpectedGap);
  const double share = 1 / (1 + std::exp(steps > 700.0 ? 700.0 : steps));
  const int kept = static_cast<int>(std::rint(count * share));  // halves to even
  return kept > 1 ? kept : 1;
}

// The scores of nodes are sums of double precision: equal ones are ties, and which node is better must not depend on
// how a sum is rounded.
struct BestFirst {
  GrownNodes nodes;
  int* next;            // of each node: of a ddtree the rank of its next child, otherwise 0; children.count: no entry
  ChildLists children;  // list n is that of node n if by_node, otherwise list d that of the nodes of depth d
  bool by_node;
  BestFirstKind kind;
  double beta;  // of top2gap: how fast the children become fewer
  int most;     // nodes, root included
  int levels;   // of the deepest node
  int count;    // nodes that there are

  // Begins with the root; returns it.
  SPECENGINE_HOST_DEVICE int begin() {
    nodes.write(0, -1, 0, 0, 0.0);
    next[0] = children.count, count = 1;
    return 0;
  }

  // Takes note of a node's children, which are in its list now; returns it.
  SPECENGINE_HOST_DEVICE int open(int node) {
    if (kind == BestFirstKind::kDdtree) {
      next[node] = 0;
      return node;
    }
    const int list = list_of(node);
    int kept = children.count;
    if (kind == BestFirstKind::kTop2gap) {
      const double first = children.log_prob(list, 0);
      kept = kept > 1 ? fanned(kept, first - children.log_prob(list, 1), beta) : 1;
    }
    for (int rank = 0; rank < kept && count < most; ++rank) add(node, rank);
    return node;
  }

  // Takes the best entry, that of a node; returns the node to open, -1 where it needs no children.
  SPECENGINE_HOST_DEVICE int take(int node) {
    if (kind != BestFirstKind::kDdtree) {
      next[node] = children.count;
      return node;
    }
    const int child = add(node, next[node]++);
    return count < most && nodes.depths[child] < levels ? child : -1;
  }

  SPECENGINE_HOST_DEVICE bool competes(int node) const { return next[node] < children.count; }

  SPECENGINE_HOST_DEVICE double value(int node) const {
    return kind == BestFirstKind::kDdtree ? nodes.scores[node] + children.log_prob(list_of(node), next[node])
                                          : nodes.scores[node];
  }

  // Whether the entry of one node, of some value, is better than that of another.
  SPECENGINE_HOST_DEVICE bool is_better(int node, double value, int other, double other_value) const {
    if (value != other_value) return value > other_value;
    return kind == BestFirstKind::kDdtree ? has_lower_ranks(node, other) : node < other;
  }

 private:
  SPECENGINE_HOST_DEVICE int list_of(int node) const { return by_node ? node : nodes.depths[node]; }

  SPECENGINE_HOST_DEVICE int add(int parent, int rank) {
    const int node = count++, depth = nodes.depths[parent] + 1;
    nodes.write(node, parent, depth, rank, nodes.scores[parent] + children.log_prob(list_of(parent), rank));
    next[node] = kind == BestFirstKind::kDdtree || depth >= levels ? children.count : 0;
    return node;
  }

  // Whether the ranks on the path to the next child of one node come before those of another's. Neither path begins
  // with the other.
  SPECENGINE_HOST_DEVICE bool has_lower_ranks(int a, int b) const {
    int rank_a = next[a], rank_b = next[b];
    const auto climb = [this](int& node, int& rank) { rank = nodes.ranks[node], node = nodes.parents[node]; };
    while (nodes.depths[a] > nodes.depths[b]) climb(a, rank_a);
    while (nodes.depths[b] > nodes.depths[a]) climb(b, rank_b);
    while (a != b) climb(a, rank_a), climb(b, rank_b);
    return rank_a < rank_b;
  }
};

// Returns the node to open next, -1 where there is none.  threads: those that call it, which share one tree; see
// OneThread.
template <typename Threads>
SPECENGINE_HOST_DEVICE int next_opened(BestFirst& tree, const Threads& threads) {
  while (tree.count < tree.most) {
    const int from = threads.best(tree);
    if (from < 0) return -1;
    const int node = threads.once(tree, [&] { return tree.take(from); });
    if (node >= 0) return node;
  }
  return -1;
}

struct OneThread {
  // Runs a step that changes the tree, once; returns to all threads what it returned.
  template <typename Step>
  static int once(BestFirst&, const Step& step) {
    return step();
  }

  // The node with the best entry, -1: there is none.
  static int best(const BestFirst& tree) {
    int best = -1;
    double highest = 0;
    for (int node = 0; node < tree.count; ++node) {
      if (!tree.competes(node)) continue;
      const double value = tree.value(node);
      if (best < 0 || tree.is_better(node, value, best, highest)) best = node, highest = value;
    }
    return best;
  }
};

// Grows a tree whose children are all known.
template <typename Threads>
SPECENGINE_HOST_DEVICE void grow(BestFirst& tree, const Threads& threads) {
  threads.once(tree, [&] { return tree.begin(); });
  for (int node = 0; node >= 0; node = next_opened(tree, threads)) threads.once(tree, [&] { return tree.open(node); });
}

}  // namespace specengine
