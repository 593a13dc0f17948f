// The tree walk, from the root down; at each node a rule decides where it goes.
//
// A rule is a small functor. `needs` lists the distributions that it reads at a node; `step(rows, node)` is its
// decision there, with those distributions loaded in `rows` (rules/rows.h). A rule that does not walk from the root
// down has `verdict(rows)` instead.
#pragma once
#include "base/draw_arithmetic.h"

namespace specengine {

// Whose distribution.
enum class Side { kTarget, kDraft };

// The values that a rule may read at a node besides the target's own draw.
struct Needs {
  bool weights = false;     // the target's distribution as weights
  bool draft = false;       // and the one its children were drafted from
  bool untempered = false;  // both also as they are without temperature and filters
  bool leaders = false;     // the two largest scores of the target, before temperature and filters
  bool entropy = false;     // of the target's distribution
  bool drawn = false;       // the target's own draw, wherever the walk goes on from there
};

// The walk's step from a node: a child to follow, or -1 and the bonus token that ends the walk.
struct Step {
  int child;
  int token;
  bool relaxed = false;  // whether the exact rule would have refused the child
};

// The end of a walk: the last accepted node (its ancestors are the path) and the bonus token; kNoToken: the scores of
// that node are no distribution.
struct Verdict {
  int node = 0;
  int token = kNoToken;
  int relaxed = 0;
};

template <typename Rule, typename Rows>
SPECENGINE_HOST_DEVICE Verdict walk(const Rule& rule, Rows& rows) {
  if constexpr (requires { rule.verdict(rows); }) {
    return rule.verdict(rows);
  } else {
    constexpr Needs needs = Rule::needs;  // a copy: a static member has no address on a device
    Verdict end;
    while (rows.load(end.node, needs)) {
      const Step step = rule.step(rows, end.node);
      if (step.child < 0) {
        end.token = step.token;
        break;
      }
      end.node = step.child, end.relaxed += step.relaxed;
    }
    return end;
  }
}

}  // namespace specengine
