// Prompt lookup on the host (Saxena 2023): where the last n-grams of a text occurred before, for several n.
#pragma once
#include <utility>

#include "drafting/continuations.h"

namespace specengine {

constexpr int32_t kLongestMatch = 16;  // tokens of a match, unless an n-gram is longer

// A node's kind: bits of the match's length (1, 2-3, 4-7, 8-15, 16 or more tokens), then first branch or a later one.
constexpr int32_t kLookupKinds = 10;

class NgramIndex {
 public:
  // An occurrence's end is the position of the token behind it.
  struct Occurrence {
    int32_t end, length;
  };
  using Match = std::vector<Occurrence>;  // the longest first, then the newest

  NgramIndex(int32_t min_ngram, int32_t max_ngram);

  void append(int32_t token);
  int64_t size() const { return static_cast<int64_t>(text_.size()); }

  // Grows a tree behind the text; see grow_tree. most: occurrences looked at per n.
  Continuations draft(int32_t most, int32_t nodes, int32_t deepest, std::span<const double> rates, double least);
  // Forgets the last draft.
  void skip() { drafted_.clear(); }
  // Returns the kind of every token that the last draft might have drafted behind a committed one, and whether it is
  // the committed text's.
  std::vector<std::pair<int32_t, bool>> judge(std::span<const int32_t> committed) const;

  // The tokens that follow a match, each with its part of the match; `width` is not read.
  void branches(const Match& match, int32_t width, std::vector<Branch<Match>>& out) const;

 private:
  // The n-grams of one length. No object is made per n-gram.
  struct Length {
    std::vector<int32_t> newest;   // ends, by n-gram: open addressing, 0: free
    std::vector<int32_t> earlier;  // by end, the end before of the same n-gram, 0: none
    int32_t used = 0;
  };

  void index(int32_t end);
  Match matches(int32_t most) const;
  size_t slot(const Length& length, int32_t n, int32_t end, uint64_t hash) const;
  void grow(Length& length, int32_t n) const;
  uint64_t hash(int32_t n, int32_t end) const;

  int32_t least_;
  std::vector<int32_t> text_;
  std::vector<Length> lengths_;
  Match drafted_;  // of the last draft's root
};

}  // namespace specengine
