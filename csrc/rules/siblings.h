// Drawing the children of a node from the drafter's distribution.
#pragma once
#include "rules/rows.h"

namespace specengine {

constexpr int kUnsound = -2;  // in place of a first sibling: the scores are no distribution

// count siblings of the row that `sampler` holds, with its weights; without replacement a drawn token's becomes 0.
template <typename Sampler>
SPECENGINE_HOST_DEVICE void draw_siblings(const Sampler& sampler, uint64_t* weights, int node, int count,
                                          bool replacement, int32_t* drawn) {
  for (int i = 0; i < count; ++i) {
    const uint32_t salt = static_cast<uint32_t>(node) << 16 | static_cast<uint32_t>(i);
    const int token = draw_by_weight(sampler, weights, sampler.vocab(), sampler.seed(), sampler.root_position(),
                                     NoiseStream::kDraftBlock, NoiseStream::kDraftToken, salt);
    sampler.once([&] {
      drawn[i] = token;
      if (!replacement && token != kNoToken) weights[token] = 0;
    });
    if (token == kNoToken) return;
  }
}

}  // namespace specengine
