#include "drafting/scored_tree.h"

namespace specengine {

namespace {

void check_scored(const ScoredTree& tree) {
  check_tree(tree.tokens, tree.parents);
  if (tree.chances.size() != tree.tokens.size()) {
    fail("chances: expected ", tree.tokens.size(), ", one per node, got ", tree.chances.size());
  }
}

struct Reached {
  double reach;  // the chance that a node is reached
  int32_t tree, node;
};

// No node comes before its parent; equals are in drafting order.
bool operator<(const Reached& a, const Reached& b) {
  return a.reach != b.reach ? a.reach > b.reach : std::tie(a.tree, a.node) < std::tie(b.tree, b.node);
}

void add_likeliest(const ScoredTree& tree, int32_t number, int64_t most, std::vector<Reached>& out) {
  const auto begin = static_cast<int64_t>(out.size());
  std::vector<double> reach(tree.tokens.size(), 1.0);
  for (size_t node = 1; node < reach.size(); ++node) {
    reach[node] = reach[tree.parents[node]] * tree.chances[node];
    out.push_back({reach[node], number, static_cast<int32_t>(node)});
  }
  std::sort(out.begin() + begin, out.end());
  out.resize(std::min<size_t>(out.size(), begin + most));
}

}  // namespace

ScoredTree join_trees(ScoredTree first, const ScoredTree& second, bool pooled) {
  check_scored(first), check_scored(second);
  NodeChildren children(first.tokens, first.parents);
  Ints place{0};                                       // of the second tree's nodes
  std::vector<double> others(first.tokens.size());     // chances by the second tree
  std::vector<uint8_t> expanded(first.tokens.size());  // whether a node has children in the second tree
  for (size_t node = 1; node < second.tokens.size(); ++node) {
    const int32_t parent = place[second.parents[node]];
    int32_t child = children.find(parent, second.tokens[node]);
    if (child < 0) {
      child = static_cast<int32_t>(first.tokens.size());
      children.add(second.tokens[node], parent);
      first.tokens.push_back(second.tokens[node]);
      first.parents.push_back(parent);
      first.chances.push_back(second.chances[node]);
      others.push_back(0), expanded.push_back(0);
    }
    others[child] = second.chances[node];
    expanded[parent] = 1;
    place.push_back(child);
  }
  for (size_t node = 1; node < first.chances.size(); ++node) {
    const double own = first.chances[node], other = others[node];
    const bool mean = pooled && expanded[first.parents[node]];
    first.chances[node] = std::min(mean ? (own + other) / 2 : std::max(own, other), kSurest);
  }
  return first;
}

std::vector<std::pair<Ints, Ints>> cut_trees(std::span<const ScoredTree> trees, std::span<const double> costs,
                                             int64_t most) {
  if (most < 0) fail("most: expected at least 0, got ", most);
  std::vector<Reached> likeliest;
  for (size_t number = 0; number < trees.size(); ++number) {
    check_scored(trees[number]);
    add_likeliest(trees[number], static_cast<int32_t>(number), most, likeliest);
  }
  if (costs.size() != likeliest.size() + 1) {
    fail("costs: expected ", likeliest.size() + 1, ", one per number of nodes, got ", costs.size());
  }
  if (trees.size() > 1) std::sort(likeliest.begin(), likeliest.end());
  double best = -costs[0], expected = 0;
  size_t taken = 0;
  for (size_t count = 1; count <= likeliest.size(); ++count) {
    expected += likeliest[count - 1].reach;
    const double value = expected - costs[count];
    if (value > best) best = value, taken = count;
  }
  std::vector<Ints> places;  // in the cut trees; -1: cut off
  for (const ScoredTree& tree : trees) places.emplace_back(tree.tokens.size(), -1)[0] = 0;
  for (size_t i = 0; i < taken; ++i) places[likeliest[i].tree][likeliest[i].node] = 0;
  std::vector<std::pair<Ints, Ints>> cut(trees.size());
  for (size_t number = 0; number < trees.size(); ++number) {
    auto& [tokens, parents] = cut[number];
    for (size_t node = 0; node < places[number].size(); ++node) {
      if (places[number][node] < 0) continue;
      places[number][node] = static_cast<int32_t>(tokens.size());
      tokens.push_back(trees[number].tokens[node]);
      parents.push_back(node == 0 ? -1 : places[number][trees[number].parents[node]]);
    }
  }
  return cut;
}

std::vector<std::pair<int32_t, bool>> judge_nodes(const Ints& tokens, const Ints& parents, const Ints& committed) {
  check_tree(tokens, parents);
  Ints depths(tokens.size(), -1);  // of nodes on the committed path
  depths[0] = 0;
  std::vector<std::pair<int32_t, bool>> judged;
  for (size_t node = 1; node < tokens.size(); ++node) {
    const int32_t depth = depths[parents[node]];
    if (depth < 0 || depth == static_cast<int32_t>(committed.size())) continue;
    const bool accepted = tokens[node] == committed[depth];
    if (accepted) depths[node] = depth + 1;
    judged.emplace_back(static_cast<int32_t>(node), accepted);
  }
  return judged;
}

std::vector<SourceNodes> count_sources(const Ints& tokens, const Ints& parents, std::span<const NamedTree> sources,
                                       const Ints& accepted) {
  check_tree(tokens, parents);
  const NodeChildren children(tokens, parents);
  std::vector<SourceNodes> counts;
  std::vector<std::vector<bool>> held;  // of each name, the nodes
  for (const auto& [name, own, above] : sources) {
    check_tree(own, above);
    size_t place = 0;
    while (place < counts.size() && counts[place].name != name) ++place;
    if (place == counts.size()) counts.push_back({name, 0, {}}), held.emplace_back(tokens.size());
    Ints nodes{0};
    for (size_t node = 1; node < own.size(); ++node) {
      nodes.push_back(children.find(nodes[above[node]], own[node]));
      if (nodes.back() < 0 || held[place][nodes.back()]) continue;
      held[place][nodes.back()] = true;
      ++counts[place].drafted;
    }
  }
  for (int32_t depth = 0, node = 0; depth < static_cast<int32_t>(accepted.size()); ++depth) {
    node = children.find(node, accepted[depth]);
    for (size_t name = 0; node >= 0 && name < counts.size(); ++name) {
      if (held[name][node]) counts[name].path.push_back(depth);
    }
  }
  return counts;
}

}  // namespace specengine
