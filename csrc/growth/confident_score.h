// What a head's estimate, that a node's first child is accepted, makes of the chances of all its children.
#pragma once
#include <cmath>

#include "base/host_device.h"

namespace specengine {

constexpr float kLeastChance = 1e-30f;  // of a child, so that its logarithm is finite

// The logarithm of a child's chance: the first one's is the confidence, the others share the rest as they share
// probability. logit: of the confidence.  first, own: log-probabilities of the first child, and of this one.
SPECENGINE_HOST_DEVICE inline float confident_score(float logit, int child, float first, float own) {
  const float chance = 1.0f / (1.0f + expf(-logit));
  const float rest = fminf((1.0f - chance) / fmaxf(1.0f - expf(first), 1e-6f), 1.0f);
  return logf(fminf(fmaxf(child == 0 ? chance : expf(own) * rest, kLeastChance), 1.0f));
}

}  // namespace specengine
