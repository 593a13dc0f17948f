// Finds where a text repeats itself: a suffix automaton over token ids that grows at its end (Blumer et al. 1985), with
// the number of occurrences of each string. A token costs a few steps, for any text.
#pragma once
#include "drafting/continuations.h"

namespace specengine {

class SuffixAutomaton {
 public:
  // A state, and the number of its string's tokens that are the context's.
  struct Match {
    int32_t state, length;
  };

  SuffixAutomaton();

  void append(int32_t token);
  // Separates the tokens before from those appended later: no match spans the cut.
  void cut();
  int64_t size() const { return appended_; }
  int64_t bytes() const;

  // The number of occurrences of a string of at most kMatched + kDeepest tokens.
  int32_t count(std::span<const int32_t> string) const;

  // The longest suffix of a context that was followed by a token.
  Match longest_match(std::span<const int32_t> context) const;
  // The tokens that followed it, the most frequent first (ties: the newest), then those that followed shorter suffixes.
  void branches(Match match, int32_t width, std::vector<Branch<Match>>& out) const;

 private:
  // Stands for all strings that end at the same places of the text: the longest has `length` tokens, the shorter ones
  // are its suffixes down to one more than the link's. Edges lead to the states of these strings with a token behind.
  struct State {
    int32_t length, link, first_edge, count, newest;
  };
  struct Edge {
    int32_t state, token, target, next;
  };

  int32_t new_state(int32_t length);
  int32_t* find(int32_t state, int32_t token);
  int32_t target(int32_t state, int32_t token) const;
  void add_edge(int32_t state, int32_t token, int32_t target);
  int32_t split(int32_t parent, int32_t token, int32_t child);
  size_t slot(int32_t state, int32_t token) const;
  void grow();

  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> table_;  // of edges by state and token, open addressing; -1: free
  int32_t last_ = 0;            // of the whole text since the last cut
  Match counted_{0, 0};         // of its last tokens, as many as are counted
  int64_t appended_ = 0;
};

}  // namespace specengine
