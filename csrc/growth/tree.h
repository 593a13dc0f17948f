// A level of a growing tree: its candidates, and the rows of the next pass. CPU and CUDA share this arithmetic.
#pragma once
#include "base/draw_arithmetic.h"

namespace specengine {

// The part of an op that says where a level begins and where it goes; see ops/growth/grow_level.h.
struct Growth {
  const int *token_ids, *order, *entries, *roots, *known, *beam;
  const unsigned* above_bits;  // of the rows before
  int *tokens, *parents, *depths;
  float* scores;
  int *next_beam, *next_tokens, *next_depths;
  unsigned* next_bits;
  int64_t* next_above;
  const int64_t* origin;
  int ids, columns, width, children, level, next, words, first, first_node;
  bool fills;  // rows of children that do not exist get token 0 in place of -1: a pass on the CPU refuses that

  // Which of the children, row after row, entry i of the level is.
  SPECENGINE_HOST_DEVICE int place_of(int i) const {
    if (entries == nullptr) return i;
    const int last = width * children - 1;
    return entries[i] < 0 ? 0 : entries[i] > last ? last : entries[i];
  }
};

// children: k.
template <typename Op>
Growth growth_of(const Op& op, int64_t children, bool fills = false) {
  return {op.token_ids.template as<int>(),
          op.entries.order.template as<int>(),
          op.entries.listed.template as<int>(),
          op.roots.template as<int>(),
          op.known.template as<int>(),
          op.before.beam.template as<int>(),
          op.before.ancestors.template as<unsigned>(),
          op.candidates.tokens.template as<int>(),
          op.candidates.parents.template as<int>(),
          op.candidates.depths.template as<int>(),
          op.candidates.scores.template as<float>(),
          op.after.beam.template as<int>(),
          op.after.tokens.template as<int>(),
          op.after.depths.template as<int>(),
          op.after.ancestors.template as<unsigned>(),
          op.after.above.template as<int64_t>(),
          op.origin.template as<int64_t>(),
          op.token_ids.given() ? static_cast<int>(op.token_ids.shape[0]) : 0,
          static_cast<int>(op.candidates.tokens.shape[1]),
          static_cast<int>(op.before.beam.shape[1]),
          static_cast<int>(children),
          static_cast<int>(op.entries.listed.given() ? op.entries.listed.shape[0] : op.before.beam.shape[1] * children),
          static_cast<int>(op.after.beam.shape[1]),
          static_cast<int>(op.before.ancestors.shape[1]),
          static_cast<int>(op.first),
          static_cast<int>(op.first_node),
          fills};
}

// A drafted child: the drafter's token, -1 where there is none, and its log-probability.
struct Drafted {
  int token;
  float score;
};

struct Child {
  int token, parent, depth;
  float score;
};

// Entry i of the level of request b. The root's column may not be written yet.  best(row, j): child j of a row before.
template <typename Best>
SPECENGINE_HOST_DEVICE Child child_of(const Growth& op, int b, int i, bool known, const Best& best) {
  const int place = op.place_of(i);
  const int64_t own = static_cast<int64_t>(b) * op.columns;
  const int64_t row = static_cast<int64_t>(b) * op.width + place / op.children;
  const Drafted drafted = best(place / op.children, place % op.children);
  const int parent = op.beam[row];
  const bool below_root = op.first == 1, mapped = drafted.token >= 0 && op.token_ids != nullptr;
  const int token = !mapped ? drafted.token : drafted.token < op.ids ? op.token_ids[drafted.token] : -1;
  const float above = below_root ? 0.0f : op.scores[own + parent];
  const int parent_depth = below_root ? 0 : op.depths[own + parent];
  const int depth = !known || token < 0 || parent_depth < 0 ? -1 : parent_depth + 1;
  return {token, parent, depth, above + drafted.score};
}

// Writes entry i as a candidate; returns the key by which it is chosen.
template <typename Best>
SPECENGINE_HOST_DEVICE unsigned add_child(const Growth& op, int b, int i, bool known, const Best& best) {
  const Child child = child_of(op, b, i, known, best);
  const int64_t column = static_cast<int64_t>(b) * op.columns + op.first + i;
  op.tokens[column] = child.token, op.parents[column] = child.parent, op.depths[column] = child.depth;
  op.scores[column] = child.score;
  return key_of(child.score);
}

SPECENGINE_HOST_DEVICE inline void add_root(const Growth& op, int b) {
  const int64_t own = static_cast<int64_t>(b) * op.columns;
  op.tokens[own] = op.roots[b], op.parents[own] = -1, op.depths[own] = 0, op.scores[own] = 0.0f;
}

// Makes entry i of the level row `place` of the next pass.
template <typename Best>
SPECENGINE_HOST_DEVICE void open_row(const Growth& op, int b, int i, int place, bool known, const Best& best) {
  const Child child = child_of(op, b, i, known, best);
  const int64_t before = static_cast<int64_t>(b) * op.width + op.place_of(i) / op.children;
  const int64_t row = static_cast<int64_t>(b) * op.next + place;
  const bool exists = child.depth >= 0, used = exists || op.fills;
  const int node = op.first_node + place;
  op.next_beam[row] = op.first + i;
  op.next_tokens[row] = exists ? child.token : op.fills ? 0 : -1;
  op.next_depths[row] = exists || !op.fills ? child.depth : 0;
  op.next_above[row] = op.origin == nullptr ? before : op.origin[before];
  SPECENGINE_NO_UNROLL
  for (int w = 0; w < op.words; ++w) {
    const unsigned own = node / 32 == w ? 1u << node % 32 : 0u;
    op.next_bits[row * op.words + w] = used ? op.above_bits[before * op.words + w] | own : 0u;
  }
}

}  // namespace specengine
