// The tokens that a constraint allows at a node: packed bits, bit t % 32 of word t / 32 for token t, 1 = allowed.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace specengine {

constexpr int kMaskBits = 32;  // tokens of a word

// A row of a mask allows a token; nullptr allows all.
SPECENGINE_HOST_DEVICE inline bool is_allowed(const uint32_t* mask, int64_t token) {
  return mask == nullptr || (mask[token / kMaskBits] >> (token % kMaskBits) & 1) != 0;
}

// The masks of a tree's nodes.
struct TokenMasks {
  const uint32_t* bits;  // [N, words]; nullptr: every node allows every token
  int64_t words;

  SPECENGINE_HOST_DEVICE const uint32_t* row(int64_t node) const {
    return bits == nullptr ? nullptr : bits + node * words;
  }
};

}  // namespace specengine
