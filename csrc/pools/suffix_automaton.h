// Where a text repeats itself: a suffix automaton over token ids, grown at its end (Blumer et al. 1985), with how often
// each string occurs. A token costs a few steps, whatever the text.
#pragma once
#include "pools/continuations.h"

namespace specengine {

class SuffixAutomaton {
 public:
  // A state, and how many of its string's tokens are those of the context.
  struct Match {
    int32_t state, length;
  };

  SuffixAutomaton();

  void append(int32_t token);
  // What is appended next follows nothing before.
  void cut();
  int64_t size() const { return appended_; }
  int64_t bytes() const;

  // How often a string occurs, of no more than kMatched + kDeepest tokens.
  int32_t count(std::span<const int32_t> string) const;

  // The longest suffix of a context that something followed.
  Match longest_match(std::span<const int32_t> context) const;
  // What followed it, the most frequent ones first (the newest of equals), then what followed shorter suffixes.
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
