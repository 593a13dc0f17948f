#include "law/rule_law.h"

#include <map>

#include "law/exact_rows.h"
#include "rules/rules.h"

namespace specengine {

std::vector<std::tuple<int, int, double>> rule_law(const std::string& rule, const std::vector<double>& options,
                                                   const std::vector<int>& parents, const std::vector<int>& tokens,
                                                   const std::vector<Probs>& target_probs,
                                                   const std::vector<Probs>& draft_probs, bool replacement,
                                                   bool residual_kept) {
  const size_t nodes = tokens.size();
  if (parents.size() != nodes || target_probs.size() != nodes || draft_probs.size() != nodes) {
    fail("parents, target_probs, draft_probs: expected ", nodes, " entries each, as many as tokens");
  }
  const DraftedTree tree{tokens.data(), parents.data(), static_cast<int>(nodes), {}};
  std::map<std::pair<int, int>, double> law;
  with_rule(rule, options, [&](const auto& functor) {
    Forks forks;
    do {
      ExactRows rows(tree, target_probs, draft_probs, replacement, residual_kept, forks);
      const Verdict end = walk(functor, rows);
      law[{end.node, end.token}] += forks.probability();
    } while (forks.next_run());
  });
  std::vector<std::tuple<int, int, double>> outcomes;
  for (const auto& [end, probability] : law) outcomes.emplace_back(end.first, end.second, probability);
  return outcomes;
}

}  // namespace specengine
