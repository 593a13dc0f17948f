// How many children a row of logits has, and what their chances are.
#pragma once
#include <cmath>

#include "growth/confident_score.h"
#include "growth/tree.h"

namespace specengine {

// CAPE's classes: a row has widths[number of thresholds below its first child's chance] children. Without widths it has
// all that there are.
struct Widths {
  const float* thresholds;
  const int* widths;
  int classes;  // thresholds

  // first: the logarithm of the first child's chance.
  SPECENGINE_HOST_DEVICE int of(float first) const {
    int own = 0;
    while (own < classes && expf(first) > thresholds[own]) ++own;
    return widths[own];
  }

  SPECENGINE_HOST_DEVICE bool exists(int child, float first) const { return widths == nullptr || child < of(first); }
};

// The chances that first children are accepted, as logits, of neighbouring rows that share them; nullptr: none.
struct Confidence {
  const float* logits;
  int shared;

  // The logarithm of a child's chance. first, own: log-probabilities of the first child, and of this one.
  SPECENGINE_HOST_DEVICE float score_of(int64_t row, int child, float first, float own) const {
    return logits == nullptr ? own : confident_score(logits[row / shared], child, first, own);
  }
};

// The children of a row: its likeliest tokens. A row without a distribution has none.
struct LikeliestChildren {
  Widths widths;
  Confidence confidence;

  // tokens, log_probs: of the row.  A child past the width is below all that exist.
  SPECENGINE_HOST_DEVICE Drafted child(int64_t row, int j, const int* tokens, const float* log_probs) const {
    if (log_probs[0] != log_probs[0]) return {-1, 0.0f};
    if (!widths.exists(j, confidence.score_of(row, 0, log_probs[0], log_probs[0]))) return {-1, -INFINITY};
    return {tokens[j], confidence.score_of(row, j, log_probs[0], log_probs[j])};
  }
};

// rows: of the level.
template <typename Level>
LikeliestChildren children_of(const Level& level, int64_t rows) {
  const auto& sure = level.confidence;
  const Widths widths{level.thresholds.template as<float>(), level.widths.template as<int>(),
                      level.widths.given() ? static_cast<int>(level.thresholds.shape[0]) : 0};
  return {widths, {sure.template as<float>(), static_cast<int>(sure.given() ? rows / sure.shape[0] : 1)}};
}

}  // namespace specengine
