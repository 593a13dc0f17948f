#include "drafting/text_drafts.h"

namespace specengine {

TextDrafts::TextDrafts(std::span<const Text> texts, std::span<const int32_t> context, int32_t nodes, int32_t deepest,
                       int32_t width, std::span<const std::vector<double>> rates, double least) {
  if (texts.empty() || rates.size() != texts.size()) fail("rates: expected ", texts.size(), " lists, one at least");
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto continued = [&](const auto* text) {
      return continue_text(*text, context, nodes, deepest, width, rates[i], least);
    };
    const Continuations& tree = trees_.emplace_back(std::visit(continued, texts[i]));
    ScoredTree scored{tree.tokens, tree.parents, {1.0}};
    for (size_t node = 1; node < tree.kinds.size(); ++node) scored.chances.push_back(rates[i][tree.kinds[node]]);
    if (i == 0) {
      joint_ = std::move(scored);
    } else if (scored.tokens.size() > 1) {
      joint_ = join_trees(std::move(joint_), scored);
    }
  }
}

std::vector<TextDrafts::Verdict> TextDrafts::judge(const Ints& committed) const {
  std::vector<Verdict> verdicts;
  for (size_t i = 0; i < trees_.size(); ++i) {
    for (const auto& [node, accepted] : judge_nodes(trees_[i].tokens, trees_[i].parents, committed)) {
      verdicts.push_back({static_cast<int32_t>(i), trees_[i].kinds[node], accepted});
    }
  }
  return verdicts;
}

}  // namespace specengine
