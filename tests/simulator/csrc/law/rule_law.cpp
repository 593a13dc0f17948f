#include "law/rule_law.h"

#include <map>

#include "law/exact_rows.h"
#include "rules/rules.h"

namespace specengine {
namespace {

// A distribution without the tokens that a mask forbids; empty if nothing is left.
Probs masked(Probs probs, const std::vector<bool>& mask) {
  double sum = 0;
  for (size_t v = 0; v < probs.size(); ++v) sum += probs[v] = mask[v] ? probs[v] : 0;
  for (double& prob : probs) prob /= sum;
  return sum > 0 ? probs : Probs();
}

}  // namespace

std::vector<std::tuple<int, int, double>> rule_law(const std::string& rule, const std::vector<double>& options,
                                                   const std::vector<int>& parents, const std::vector<int>& tokens,
                                                   const std::vector<Probs>& target_probs,
                                                   const std::vector<Probs>& draft_probs, bool replacement,
                                                   bool residual_kept, const std::vector<std::vector<bool>>& masks) {
  const size_t nodes = tokens.size();
  if (parents.size() != nodes || target_probs.size() != nodes || draft_probs.size() != nodes) {
    fail("parents, target_probs, draft_probs: expected ", nodes, " entries each, as many as tokens");
  }
  std::vector<Probs> target = target_probs, draft = draft_probs;
  const size_t words = masks.empty() ? 0 : (masks[0].size() + kMaskBits - 1) / kMaskBits;
  std::vector<uint32_t> bits(masks.size() * words);
  for (size_t node = 0; node < masks.size(); ++node) {
    for (size_t v = 0; v < masks[node].size(); ++v) {
      bits[node * words + v / kMaskBits] |= static_cast<uint32_t>(masks[node][v]) << v % kMaskBits;
    }
    target[node] = masked(target[node], masks[node]), draft[node] = masked(draft[node], masks[node]);
  }
  const DraftedTree tree{tokens.data(),
                         parents.data(),
                         static_cast<int>(nodes),
                         {masks.empty() ? nullptr : bits.data(), static_cast<int64_t>(words)}};
  std::map<std::pair<int, int>, double> law;
  with_rule(rule, options, [&](const auto& functor) {
    Forks forks;
    do {
      ExactRows rows(tree, target, draft, replacement, residual_kept, forks);
      const Verdict end = walk(functor, rows);
      law[{end.node, end.token}] += forks.probability();
    } while (forks.next_run());
  });
  std::vector<std::tuple<int, int, double>> outcomes;
  for (const auto& [end, probability] : law) outcomes.emplace_back(end.first, end.second, probability);
  return outcomes;
}

}  // namespace specengine
