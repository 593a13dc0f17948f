// Below which token the tree of a request grows, and how deep it may be.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace specengine {

// known: 0 where nothing is drafted. Then either limits, or what the history says: a tree has no level that could not
// be committed besides the bonus token. active: 0 of an idle request. What is nullptr limits nothing.
struct DeepestLevel {
  const int *known, *limits, *history_length, *final_length, *active;
  int levels;

  SPECENGINE_HOST_DEVICE int of(int b) const {
    if ((known != nullptr && known[b] <= 0) || (active != nullptr && active[b] == 0)) return 0;
    int deepest = levels;
    if (limits != nullptr) deepest = limits[b];
    if (final_length != nullptr) {  // without a sign: numbers that make no sense wrap around, as on a GPU
      deepest =
          static_cast<int>(static_cast<unsigned>(final_length[b]) - static_cast<unsigned>(history_length[b]) - 1u);
    }
    return deepest < 0 ? 0 : deepest > levels ? levels : deepest;
  }
};

// The last tokens of texts [B, capacity]; lengths: nullptr: they are one token each.
struct Roots {
  const int *texts, *lengths;
  int capacity;

  SPECENGINE_HOST_DEVICE int of(int b) const {
    const int last = lengths == nullptr ? 0 : static_cast<int>(static_cast<unsigned>(lengths[b]) - 1u);
    return texts[static_cast<int64_t>(b) * capacity + (last < 0 ? 0 : last >= capacity ? capacity - 1 : last)];
  }
};

}  // namespace specengine
