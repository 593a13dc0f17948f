// When another level is not worth its pass.
#pragma once
#include <algorithm>
#include <cmath>

#include "ops/growth/grow_level.h"

namespace specengine {

// Whether the next level is expected to add at least min_gain tokens, the sum over the requests. The expectation: where
// the text reaches a node that is expanded with probability r (the sum over the beam, at most 1) after d levels, it
// reaches one of the next level with probability r^(1 + 1/d), as if the next token were as likely as the mean of those
// above it.
inline bool another_level_pays(const CandidateColumns& candidates, const TensorView& beam, int64_t d, float min_gain) {
  const int64_t C = candidates.scores.shape[1], w = beam.shape[1];
  double tokens = 0;
  for (int64_t b = 0; b < beam.shape[0] && min_gain > 0; ++b) {
    double reached = 0;
    for (int64_t j = 0; j < w; ++j) {
      const double score = candidates.scores.as<float>()[b * C + beam.as<int32_t>()[b * w + j]];
      reached += std::exp(score);
    }
    reached = std::min(reached, 1.0);  // the text goes through one of the nodes at most
    tokens += std::pow(reached, 1 + 1 / static_cast<double>(d));
  }
  return !(tokens < min_gain);
}

}  // namespace specengine
