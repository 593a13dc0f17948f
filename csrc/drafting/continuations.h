// A tree of the tokens that followed the end of a context in a text, likeliest node first.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <queue>
#include <span>
#include <vector>

#include "base/check.h"

namespace specengine {

constexpr int32_t kMatched = 32;  // tokens of a context that are searched
constexpr int32_t kDeepest = 32;  // tokens of a continuation

// A continuation's kind: the class of the matched length (1, 2-3, 4-7, 8-15, 16 or more tokens) times one of six cases:
// the only continuation, seen once or more often; the first of several, with at least half of the occurrences or fewer;
// a later one, likewise.
constexpr int32_t kKindsPerLength = 6;
constexpr int32_t kKinds = 5 * kKindsPerLength;

inline int32_t kind_of(int32_t length, int64_t count, int64_t all, bool first) {
  const int32_t bits = std::min<int32_t>(std::bit_width(static_cast<uint32_t>(length)), 5) - 1;
  const bool most = 2 * count >= all;
  const int32_t known = !first ? (most ? 4 : 5) : count < all ? (most ? 2 : 3) : count > 1 ? 1 : 0;
  return bits * kKindsPerLength + known;
}

// Node 0 is the root; parents[0] = kinds[0] = -1.
struct Continuations {
  std::vector<int32_t> tokens, parents, kinds;
};

// A token that followed a match, and the match extended by it.
template <typename Match>
struct Branch {
  int32_t token, kind;
  Match match;
};

// Grows the tree, the likeliest node next, until it has `nodes` nodes, root included, or the next would be less likely
// than `least`. text: has branches(match, width, out), the likeliest first.  match: of the root.  width: branches of a
// node.  rates: by kind, the probability of a node given its parent.
template <typename Text>
Continuations grow_tree(const Text& text, int32_t root, typename Text::Match match, int32_t nodes, int32_t deepest,
                        int32_t width, std::span<const double> rates, double least) {
  using Match = typename Text::Match;
  struct Waiting {
    double reach;
    int32_t number, parent, depth;
    Branch<Match> branch;
    bool operator<(const Waiting& other) const {
      return reach != other.reach ? reach < other.reach : number > other.number;  // ties: the earlier one first
    }
  };
  Continuations tree{{root}, {-1}, {-1}};
  std::priority_queue<Waiting> waiting;
  std::vector<Branch<Match>> found;
  int32_t number = 0, depth = 0;
  double reach = 1;
  for (int32_t node = 0;; ++node) {
    if (depth < deepest) {
      found.clear();
      text.branches(match, width, found);
      for (const auto& branch : found) waiting.push({reach * rates[branch.kind], number++, node, depth + 1, branch});
    }
    if (node + 1 >= nodes || waiting.empty() || waiting.top().reach < least) return tree;
    const Waiting next = waiting.top();
    waiting.pop();
    reach = next.reach, depth = next.depth, match = next.branch.match;
    tree.tokens.push_back(next.branch.token);
    tree.parents.push_back(next.parent);
    tree.kinds.push_back(next.branch.kind);
  }
}

inline void check_rates(std::span<const double> rates, int32_t kinds) {
  if (rates.size() != static_cast<size_t>(kinds)) fail("rates: expected ", kinds, ", got ", rates.size());
}

// Grows the tree behind a context. text: has longest_match(context) too.
template <typename Text>
Continuations continue_text(const Text& text, std::span<const int32_t> context, int32_t nodes, int32_t deepest,
                            int32_t width, std::span<const double> rates, double least) {
  if (context.empty()) fail("context: expected at least one token");
  check_rates(rates, kKinds);
  const auto match = text.longest_match(context.last(std::min<size_t>(context.size(), kMatched)));
  return grow_tree(text, context.back(), match, nodes, std::min(deepest, kDeepest), width, rates, least);
}

}  // namespace specengine
