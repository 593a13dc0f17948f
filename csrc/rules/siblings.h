// Drawing the children of a node from the drafter's distribution.
#pragma once
#include "rules/rows.h"

namespace specengine {

constexpr int kUnsound = -2;  // written in place of the first sibling: the scores are no distribution

// Draws `count` siblings from the sampler's row; without replacement a drawn token's weight becomes 0. as_match: the
// first is the token that rule `match` draws from the row, each further one its draw without the siblings before.
template <typename Sampler>
SPECENGINE_HOST_DEVICE void draw_siblings(const Sampler& sampler, uint64_t* weights, int node, int count,
                                          bool replacement, bool as_match, int32_t* drawn) {
  if (!as_match || count > 1) sampler.weigh(weights);
  const auto draw = [&](int i) {
    if (as_match) return i == 0 ? sampler.draw() : sampler.draw_by_weight(weights);
    const uint32_t salt = static_cast<uint32_t>(node) << 16 | static_cast<uint32_t>(i);
    return draw_by_weight(sampler, weights, sampler.vocab(), sampler.seed(), sampler.root_position(),
                          NoiseStream::kDraftBlock, NoiseStream::kDraftToken, salt);
  };
  for (int i = 0; i < count; ++i) {
    const int token = draw(i);
    sampler.once([&] {
      drawn[i] = token;
      if (!replacement && token != kNoToken) weights[token] = 0;
    });
    if (token == kNoToken) return;
  }
}

}  // namespace specengine
