// A large constant text with its suffix array, as in REST (He et al. 2023).
#pragma once
#include "base/tensor_view.h"
#include "drafting/continuations.h"

namespace specengine {

// Writes the positions of a text in the order of the strings that begin there, compared over kMatched + kDeepest
// tokens; ties in the order of the text. tokens, order: int32 [n]; a token below 0 ends a text.
void sort_suffixes(const TensorView& tokens, const TensorView& order);

class TextCorpus {
 public:
  // Positions [begin, end) of the order; the strings there all begin with the match.
  struct Match {
    int64_t begin, end;
    int32_t length;
  };

  // Borrows both tensors; tokens may also be uint16 [n], with 65535 for a token below 0. They come from a file, so no
  // content of theirs may lead to a read outside of them.
  TextCorpus(const TensorView& tokens, const TensorView& order);

  int64_t size() const { return size_; }
  Match longest_match(std::span<const int32_t> context) const;
  // The most frequent tokens behind a match, estimated from a sample of occurrences spread evenly over all of them.
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
