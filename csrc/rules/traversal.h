// Rule `traversal` (Weng et al. 2025, arXiv 2505.12398) and, on chains, rule `block` (Sun et al. 2024, arXiv
// 2403.10444): from the leaves to the root. A node's chance `value` is min(1, parent's chance * target / draft); a node
// without children left is accepted with it, and with it its whole path. A refused one leaves norm(max(chance * target
// - draft, 0)) at its parent, whose chance becomes S / (S + 1 - chance) for the mass S of that, and the next sibling
// has its turn. Guarantee: the output has the target's distribution; accepts at least as much as `rejection` in
// expectation. Needs what `rejection` needs.
#pragma once
#include "rules/walk.h"

namespace specengine {

struct Traversal {
  static constexpr Needs needs{.weights = true, .draft = true};
  enum Mark { kOpen, kRefused };  // value(node) of a refused one: the parent's chance when it was refused

  template <typename Rows>
  SPECENGINE_HOST_DEVICE Verdict verdict(Rows& rows) const {
    rows.note(0, 1.0, kOpen);
    for (int node = 1; node < rows.nodes(); ++node) rows.note(node, 0.0, kOpen);
    int node = 0;
    while (true) {
      int child = rows.first_child(node);
      while (child >= 0 && rows.mark(child) == kRefused) child = rows.next_sibling(child);
      if (child >= 0) {  // go on down
        if (!restore(rows, node)) return {node};
        const double draft = rows.draft_prob(rows.token(child)), target = rows.target_prob(rows.token(child));
        const double chance = draft > 0 ? rows.value(node) * target / draft : 1.0;
        rows.note(child, chance < 1 ? chance : 1.0, kOpen);
        node = child;
        continue;
      }
      if (rows.accepts(node, rows.value(node))) return {node, restore(rows, node) ? rows.residual() : kNoToken};
      const int refused = node;
      node = rows.parent(node);
      if (!restore(rows, node)) return {node};
      const double chance = rows.value(node), mass = rows.reject(refused, chance);
      rows.note(refused, chance, kRefused);
      rows.note(node, mass + (1 - chance) > 0 ? mass / (mass + (1 - chance)) : 1.0, kOpen);
    }
  }

 private:
  // Loads a node as its refused children left it.
  template <typename Rows>
  SPECENGINE_HOST_DEVICE static bool restore(Rows& rows, int node) {
    if (rows.loaded() == node) return true;
    constexpr Needs asked = needs;
    if (!rows.load(node, asked)) return false;
    for (int child = rows.first_child(node); child >= 0; child = rows.next_sibling(child)) {
      if (rows.mark(child) == kRefused) rows.reject(child, rows.value(child));
    }
    return true;
  }
};

}  // namespace specengine
