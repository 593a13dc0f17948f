// What several texts say behind one context: a tree of each, and their joint tree.
#pragma once
#include <variant>

#include "drafting/scored_tree.h"
#include "drafting/suffix_automaton.h"
#include "drafting/text_corpus.h"

namespace specengine {

class TextDrafts {
 public:
  using Text = std::variant<const SuffixAutomaton*, const TextCorpus*>;

  // Continues the texts; see continue_text. rates: of each text.
  TextDrafts(std::span<const Text> texts, std::span<const int32_t> context, int32_t nodes, int32_t deepest,
             int32_t width, std::span<const std::vector<double>> rates, double least);

  const ScoredTree& joint() const { return joint_; }
  const std::vector<Continuations>& trees() const { return trees_; }

  // A node whose parent the committed text runs through, and whether the text runs through the node.
  struct Verdict {
    int32_t text, kind;
    bool accepted;
  };
  std::vector<Verdict> judge(const Ints& committed) const;

 private:
  ScoredTree joint_;
  std::vector<Continuations> trees_;
};

}  // namespace specengine
