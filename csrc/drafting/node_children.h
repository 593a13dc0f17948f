// Finds a node's child by its token.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"

namespace specengine {

// Checks that node 0 is the root, parent -1, and that every other node's parent is an earlier node.
inline void check_tree(std::span<const int32_t> tokens, std::span<const int32_t> parents) {
  if (tokens.empty() || tokens.size() != parents.size()) {
    fail("parents: expected one per node, of one node at least, got ", parents.size(), " for ", tokens.size());
  }
  for (size_t node = 0; node < parents.size(); ++node) {
    if (node == 0 ? parents[0] == -1 : parents[node] >= 0 && parents[node] < static_cast<int32_t>(node)) continue;
    fail("parents: parent of node ", node, " is ", parents[node], ", expected an earlier node (-1 for the root)");
  }
}

class NodeChildren {
 public:
  explicit NodeChildren(size_t nodes) { nodes_.reserve(nodes); }

  NodeChildren(std::span<const int32_t> tokens, std::span<const int32_t> parents) : NodeChildren(tokens.size()) {
    for (size_t node = 0; node < tokens.size(); ++node) add(tokens[node], parents[node]);
  }

  // Adds the next node.
  void add(int32_t token, int32_t parent) {
    nodes_.push_back({token, -1, -1});
    if (parent < 0) return;
    nodes_.back().sibling = nodes_[parent].child;
    nodes_[parent].child = static_cast<int32_t>(nodes_.size()) - 1;
  }

  // Returns the child of a node with this token, the newest of several; -1: there is none. Below -1 is nothing.
  int32_t find(int32_t parent, int32_t token) const {
    if (parent < 0) return -1;
    int32_t node = nodes_[parent].child;
    while (node >= 0 && nodes_[node].token != token) node = nodes_[node].sibling;
    return node;
  }

 private:
  struct Node {
    int32_t token, child, sibling;  // the newest child, and the next older child of the same parent
  };
  std::vector<Node> nodes_;
};

}  // namespace specengine
