// Notes on a row that do not depend on the walk: what note_rows.cu writes by parts, and how a reader merges the parts.
#pragma once
#include "cuda/sampling/shaped_row.cuh"
#include "rules/rows.h"

namespace specengine {

// A row's two largest scores before temperature and filters, ties to the lower token. first without a token: the row is
// no distribution.
struct TopTwo {
  Candidate first, second;

  __device__ Leaders leaders() const {
    return {{static_cast<int>(first.token), static_cast<float>(first.value)},
            {second.token == kNoToken ? 0 : static_cast<int>(second.token), static_cast<float>(second.value)}};
  }
};

__device__ inline TopTwo top_two(const RowNotes& notes, int parts) {
  TopTwo top{nothing(), nothing()};
  for (int i = 0; i < parts; ++i) {
    top.first = better(top.first, {notes.parts[i].best, notes.parts[i].best_token});
  }
  for (int i = 0; i < parts; ++i) {
    const RowPart& part = notes.parts[i];
    const bool taken = part.best_token == top.first.token;
    const Candidate other{taken ? part.second : part.best, taken ? part.second_token : part.best_token};
    if (other.token != kNoToken) top.second = better(top.second, other);
  }
  return top;
}

// The largest score as temperature makes it; false if that is no number.
__device__ inline bool temper(const TopTwo& top, float temperature, float* score) {
  if (top.first.token == kNoToken) return false;
  *score = static_cast<float>(top.first.value);
  if (temperature != 0.0f) *score /= temperature;
  return *score > -INFINITY && *score < INFINITY;
}

}  // namespace specengine
