// The exact law of a rule on one drafted tree, for tests: no sampling, all ways its coins and draws can fall are
// summed.
#pragma once
#include <string>
#include <tuple>
#include <vector>

namespace specengine {

// (last accepted node, bonus token, probability), for every outcome that can be. rule, options: as in rules/rules.h.
// A score is the log-probability plus kScoreShift. target_probs, draft_probs: [N][V], empty where a node's children
// come from no draft distribution. residual_kept: breaks the rule, for tests that must notice. masks: [N][V], whether a
// node allows a token; empty: there are none.
std::vector<std::tuple<int, int, double>> rule_law(const std::string& rule, const std::vector<double>& options,
                                                   const std::vector<int>& parents, const std::vector<int>& tokens,
                                                   const std::vector<std::vector<double>>& target_probs,
                                                   const std::vector<std::vector<double>>& draft_probs,
                                                   bool replacement, bool residual_kept,
                                                   const std::vector<std::vector<bool>>& masks);

}  // namespace specengine
