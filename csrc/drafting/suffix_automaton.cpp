#include "drafting/suffix_automaton.h"

#include <tuple>

namespace specengine {

namespace {

constexpr int32_t kRoot = 0, kNone = -1;
constexpr int32_t kCounted = kMatched + kDeepest;

}  // namespace

SuffixAutomaton::SuffixAutomaton() : table_(64, kNone) { new_state(0); }

int32_t SuffixAutomaton::new_state(int32_t length) {
  states_.push_back({length, kNone, kNone, 0, 0});
  return static_cast<int32_t>(states_.size()) - 1;
}

int64_t SuffixAutomaton::bytes() const {
  return states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + table_.capacity() * sizeof(int32_t);
}

void SuffixAutomaton::append(int32_t token) {
  if (token < 0) fail("token: expected an id, got ", token);
  // States and edges are at most two and three per token; their numbers are 32 bits wide.
  if (appended_ >= (int64_t{1} << 29)) fail("token: the automaton is full with ", appended_, " tokens");
  const int32_t before = last_;
  int32_t cloned = kNone, clone = kNone;
  const auto split_once = [&](int32_t parent, int32_t child) {
    cloned = child;
    return clone = split(parent, token, child);
  };
  if (const int32_t known = target(before, token); known != kNone) {  // only after a cut: otherwise the text is new
    last_ = states_[known].length == states_[before].length + 1 ? known : split_once(before, known);
  } else {
    last_ = new_state(states_[before].length + 1);
    int32_t state = before;
    while (state != kNone && target(state, token) == kNone) {
      add_edge(state, token, last_);
      state = states_[state].link;
    }
    if (state == kNone) {
      states_[last_].link = kRoot;
    } else {
      const int32_t child = target(state, token);
      const bool whole = states_[child].length == states_[state].length + 1;
      const int32_t link = whole ? child : split_once(state, child);
      states_[last_].link = link;
    }
  }
  if (counted_.state == cloned && counted_.length <= states_[clone].length) counted_.state = clone;
  counted_ = {target(counted_.state, token), counted_.length + 1};
  if (counted_.length > kCounted) {
    counted_.length = kCounted;
    while (states_[states_[counted_.state].link].length >= kCounted) counted_.state = states_[counted_.state].link;
  }
  ++appended_;
  for (int32_t state = counted_.state; state != kRoot; state = states_[state].link) {
    ++states_[state].count;
    states_[state].newest = static_cast<int32_t>(appended_);
  }
}

void SuffixAutomaton::cut() {
  last_ = kRoot;
  counted_ = {kRoot, 0};
}

// Moves the strings of `child` that are no longer than `parent`'s strings with the token appended to a new state.
int32_t SuffixAutomaton::split(int32_t parent, int32_t token, int32_t child) {
  const int32_t clone = new_state(states_[parent].length + 1);
  states_[clone].link = states_[child].link;
  states_[clone].count = states_[child].count;
  states_[clone].newest = states_[child].newest;
  for (int32_t edge = states_[child].first_edge; edge != kNone; edge = edges_[edge].next) {
    add_edge(clone, edges_[edge].token, edges_[edge].target);
  }
  states_[child].link = clone;
  for (int32_t state = parent; state != kNone; state = states_[state].link) {
    int32_t* to = find(state, token);
    if (to == nullptr || *to != child) break;
    *to = clone;
  }
  return clone;
}

size_t SuffixAutomaton::slot(int32_t state, int32_t token) const {
  uint64_t key = static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token);
  key *= 0x9E3779B97F4A7C15u;
  size_t place = (key ^ key >> 32) & (table_.size() - 1);
  while (table_[place] != kNone && (edges_[table_[place]].state != state || edges_[table_[place]].token != token)) {
    place = (place + 1) & (table_.size() - 1);
  }
  return place;
}

int32_t* SuffixAutomaton::find(int32_t state, int32_t token) {
  const int32_t edge = table_[slot(state, token)];
  return edge == kNone ? nullptr : &edges_[edge].target;
}

int32_t SuffixAutomaton::target(int32_t state, int32_t token) const {
  const int32_t edge = table_[slot(state, token)];
  return edge == kNone ? kNone : edges_[edge].target;
}

void SuffixAutomaton::add_edge(int32_t state, int32_t token, int32_t target) {
  if (2 * (edges_.size() + 1) > table_.size()) grow();
  table_[slot(state, token)] = static_cast<int32_t>(edges_.size());
  edges_.push_back({state, token, target, states_[state].first_edge});
  states_[state].first_edge = static_cast<int32_t>(edges_.size()) - 1;
}

void SuffixAutomaton::grow() {
  table_.assign(2 * table_.size(), kNone);
  for (size_t edge = 0; edge < edges_.size(); ++edge) {
    table_[slot(edges_[edge].state, edges_[edge].token)] = static_cast<int32_t>(edge);
  }
}

int32_t SuffixAutomaton::count(std::span<const int32_t> string) const {
  if (string.empty() || string.size() > kCounted)
    fail("string: expected 1 to ", kCounted, " tokens, got ", string.size());
  int32_t state = kRoot;
  for (const int32_t token : string) {
    state = target(state, token);
    if (state == kNone) return 0;
  }
  return states_[state].count;
}

SuffixAutomaton::Match SuffixAutomaton::longest_match(std::span<const int32_t> context) const {
  Match match{kRoot, 0};
  for (const int32_t token : context) {
    int32_t to = target(match.state, token);
    while (to == kNone && match.state != kRoot) {
      match.state = states_[match.state].link;
      match.length = states_[match.state].length;
      to = target(match.state, token);
    }
    if (to != kNone) match = {to, match.length + 1};
  }
  while (match.state != kRoot && states_[match.state].first_edge == kNone) {
    match.state = states_[match.state].link;
    match.length = states_[match.state].length;
  }
  return match;
}

void SuffixAutomaton::branches(Match match, int32_t width, std::vector<Branch<Match>>& out) const {
  struct Follower {
    int32_t count, newest, edge;
    bool operator<(const Follower& other) const {
      return std::tie(count, newest) > std::tie(other.count, other.newest);
    }
  };
  std::vector<Follower> best;  // of a state, in order
  const auto is_new = [&](int32_t token) {
    return std::none_of(out.begin(), out.end(), [&](const Branch<Match>& branch) { return branch.token == token; });
  };
  while (match.state != kRoot && static_cast<int32_t>(out.size()) < width) {
    const size_t wanted = width - out.size();
    int32_t all = 0;
    best.clear();
    // One pass: a common token has thousands of followers, each in a line of memory that no cache holds.
    for (int32_t edge = states_[match.state].first_edge; edge != kNone; edge = edges_[edge].next) {
      const State& there = states_[edges_[edge].target];
      const Follower follower{there.count, there.newest, edge};
      all += there.count;
      if ((best.size() == wanted && !(follower < best.back())) || !is_new(edges_[edge].token)) continue;
      if (best.size() == wanted) best.pop_back();
      best.insert(std::upper_bound(best.begin(), best.end(), follower), follower);
    }
    for (const Follower& follower : best) {
      out.push_back({edges_[follower.edge].token, kind_of(match.length, follower.count, all, out.empty()),
                     Match{edges_[follower.edge].target, match.length + 1}});
    }
    match.state = states_[match.state].link;
    match.length = states_[match.state].length;
  }
}

}  // namespace specengine
