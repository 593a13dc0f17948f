// A large text that does not change, with its suffix array: what REST drafts from (He et al. 2023).
#pragma once
#include "base/tensor_view.h"
#include "pools/continuations.h"

namespace specengine {

// Writes the positions of a text in the order of what begins there, compared over kMatched + kDeepest tokens; equals in
// the order of the text. tokens, order: int32 [n]; a token below 0 ends a text.
void sort_suffixes(const TensorView& tokens, const TensorView& order);

class TextCorpus {
 public:
  // Positions [begin, end) of the order, whose texts all begin with the match.
  struct Match {
    int64_t begin, end;
    int32_t length;
  };

  // Refers to both tensors; tokens may be uint16 [n], too, with 65535 for one below 0. They come from a file: whatever
  // they hold, nothing outside of them is read.
  TextCorpus(const TensorView& tokens, const TensorView& order);

  int64_t size() const { return size_; }
  Match longest_match(std::span<const int32_t> context) const;
  // The most frequent tokens behind a match, as far as some occurrences, spread evenly over all of them, tell.
  void branches(const Match& match, int32_t width, std::vector<Branch<Match>>& out) const;

 private:
  // The token `offset` behind the text at a place of the order; -1: there is none.
  int32_t token_at(int64_t place, int32_t offset) const;
  Match range(std::span<const int32_t> string) const;
  template <typename Before>
  int64_t first_not(int64_t begin, int64_t end, const Before& before) const;

  const int32_t* tokens_;  // or:
  const uint16_t* narrow_;
  const int32_t* order_;
  int64_t size_;
};

}  // namespace specengine
