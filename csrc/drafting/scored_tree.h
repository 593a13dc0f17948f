// Trees whose nodes have chances: joined, cut to the nodes that pay, compared with the committed text. Node 0 is the
// root, parent -1; every other node's parent is an earlier node. Functions throw for other parents.
#pragma once
#include <string>
#include <tuple>
#include <utility>

#include "drafting/node_children.h"

namespace specengine {

using Ints = std::vector<int32_t>;

// chances: of each node, once its parent is accepted.
struct ScoredTree {
  Ints tokens, parents;
  std::vector<double> chances;
};

// Joins two trees with the same root. A node of both appears once, with the higher chance, kSurest at most.
// pooled: of a parent that has children in the second tree, a node has the mean of both chances, 0 where it is missing.
// A node of the second tree alone keeps its chance.
constexpr double kSurest = 0.99;
ScoredTree join_trees(ScoredTree first, const ScoredTree& second, bool pooled = false);

// Cuts trees to those nodes for which expected tokens less the cost of their number are most; returns tokens and
// parents. costs: in tokens, of 0 and more nodes in all, roots excluded.  most: nodes of a tree, root excluded.
std::vector<std::pair<Ints, Ints>> cut_trees(std::span<const ScoredTree> trees, std::span<const double> costs,
                                             int64_t most);

// Returns every node whose parent the text runs through, and whether it runs through the node.
// committed: the text behind the root.
std::vector<std::pair<int32_t, bool>> judge_nodes(const Ints& tokens, const Ints& parents, const Ints& committed);

// The nodes of a verified tree that one source drafted. path: their places on the accepted path, from 0 on.
struct SourceNodes {
  std::string name;
  int32_t drafted;
  Ints path;
};

// One tree that a verified tree was made of; borrowed.
struct NamedTree {
  const std::string& name;
  const Ints &tokens, &parents;
};

// Returns the nodes of every source; trees of one name count as one. accepted: the accepted tokens.
std::vector<SourceNodes> count_sources(const Ints& tokens, const Ints& parents, std::span<const NamedTree> sources,
                                       const Ints& accepted);

}  // namespace specengine
