// Which entries of a level are expanded next: its best ones, of equals the earlier one; or given ones.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "growth/tree.h"

namespace specengine {

// Whether entry j of a level comes before entry i.
SPECENGINE_HOST_DEVICE inline bool precedes(unsigned key_j, int j, unsigned key_i, int i) {
  return key_j > key_i || (key_j == key_i && j < i);
}

// A given entry, as one of the level.
SPECENGINE_HOST_DEVICE inline int entry_of(const Growth& op, int place) {
  const int entry = op.order[place], last = op.level - 1;
  return entry < 0 ? 0 : entry > last ? last : entry;
}

// Writes the level of request b and the rows after it, on the CPU; cuda/trees/level_growth.cuh does it by a block.
template <typename Best>
void grow_level(const Growth& op, int b, const Best& best) {
  const bool known = op.known[b] > 0;
  std::vector<unsigned> keys(op.level);
  for (int i = 0; i < op.level; ++i) keys[i] = add_child(op, b, i, known, best);
  if (op.first == 1) add_root(op, b);
  std::vector<int> order(op.next == 0 || op.order != nullptr ? op.next : op.level);
  if (op.order != nullptr) {
    for (int place = 0; place < op.next; ++place) order[place] = entry_of(op, place);
  } else {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + op.next, order.end(),
                      [&](int j, int i) { return precedes(keys[j], j, keys[i], i); });
  }
  for (int place = 0; place < op.next; ++place) open_row(op, b, order[place], place, known, best);
}

}  // namespace specengine
