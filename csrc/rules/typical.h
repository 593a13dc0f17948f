// Rule `typical` (Medusa): follow the longest path of tokens that are typical of the target,
// target_prob > min(epsilon, delta * exp(-entropy)), or that it draws itself. Ties: the likelier path, then the first.
// Lossy; epsilon = 1 with delta = 1e9 is `match` bit for bit. Needs nothing of the drafter.
#pragma once
#include "rules/walk.h"

namespace specengine {

struct Typical {
  static constexpr Needs needs{.weights = true, .entropy = true, .drawn = true};
  double epsilon, delta;

  template <typename Rows>
  SPECENGINE_HOST_DEVICE Verdict verdict(Rows& rows) const {
    constexpr Needs asked = needs;
    // value(node): summed log-probability of its path; mark(node): 0 if not accepted, else 1, or 2 where it is relaxed.
    rows.note(0, 0.0, 1);
    for (int node = 1; node < rows.nodes(); ++node) rows.note(node, 0.0, 0);
    int best = 0, best_depth = 0;
    for (int node = 0; node < rows.nodes(); ++node) {
      if (rows.mark(node) == 0) continue;
      const int depth = rows.depth(node);
      if (depth > best_depth || (depth == best_depth && rows.value(node) > rows.value(best))) {
        best = node, best_depth = depth;
      }
      if (rows.first_child(node) < 0 || !rows.load(node, asked)) continue;
      const int drawn = rows.drawn();
      const double limit = delta * std::exp(-rows.entropy()), threshold = limit < epsilon ? limit : epsilon;
      for (int child = rows.first_child(node); child >= 0; child = rows.next_sibling(child)) {
        const int token = rows.token(child);
        const double prob = rows.target_prob(token);
        const bool typical = prob > threshold, exact = token == drawn;
        if (typical || exact) rows.note(child, rows.value(node) + std::log(prob), exact ? 1 : 2);
      }
    }
    Verdict end{best};
    for (int node = best; node > 0; node = rows.parent(node)) end.relaxed += rows.mark(node) == 2;
    if (rows.load(best, asked)) end.token = rows.drawn();
    return end;
  }
};

}  // namespace specengine
