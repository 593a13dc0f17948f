// When another level is not worth its pass.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace specengine {

// The nodes that the next level would expand. scores: [B, columns], cumulative log-probabilities.
struct Reached {
  const float* scores;
  int64_t columns;
  const int32_t* beam;  // [B, width], columns
  int64_t width;
};

// Whether the next level is expected to add at least min_gain tokens, the sum over B requests. The expectation: where
// the text reaches a node that is expanded with probability r (the sum over the beam, at most 1) after d levels, it
// reaches one of the next level with probability r^(1 + 1/d), as if the next token were as likely as the mean of those
// above it.
inline bool another_level_pays(const Reached& nodes, int64_t B, int64_t d, float min_gain) {
  double tokens = 0;
  for (int64_t b = 0; b < B && min_gain > 0; ++b) {
    double reached = 0;
    for (int64_t j = 0; j < nodes.width; ++j) {
      reached += std::exp(static_cast<double>(nodes.scores[b * nodes.columns + nodes.beam[b * nodes.width + j]]));
    }
    reached = std::min(reached, 1.0);  // the text goes through one of the nodes at most
    tokens += std::pow(reached, 1 + 1 / static_cast<double>(d));
  }
  return !(tokens < min_gain);
}

}  // namespace specengine
