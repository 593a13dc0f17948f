// A level of a growing tree, by one block per request. Its threads share the candidates of the level and count, for
// each, how many are better. Floor: the level's candidates once.
#pragma once
#include "cuda/base/arch.cuh"
#include "ops/growth/grow_level.h"

namespace specengine {

// The part of an op that says where a level begins and where it goes.
struct Growth {
  const int *token_ids, *order, *roots, *known, *beam;
  const unsigned* above_bits;  // of the rows before
  int *tokens, *parents, *depths;
  float* scores;
  int *next_beam, *next_tokens, *next_depths;
  unsigned* next_bits;
  int64_t* next_above;
  const int64_t* origin;
  int ids, columns, width, children, next, words, first, first_node;
};

// children: k.
template <typename Op>
Growth growth_of(const Op& op, int64_t children) {
  return {op.token_ids.template as<int>(),
          op.order.template as<int>(),
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
          static_cast<int>(op.after.beam.shape[1]),
          static_cast<int>(op.before.ancestors.shape[1]),
          static_cast<int>(op.first),
          static_cast<int>(op.first_node)};
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

// Entry i of the level of request b. The root's column may not be written yet.
template <typename Best>
__device__ Child child_of(const Growth& op, int b, int i, bool known, const Best& best) {
  const int64_t own = static_cast<int64_t>(b) * op.columns, row = static_cast<int64_t>(b) * op.width + i / op.children;
  const Drafted drafted = best(i / op.children, i % op.children);
  const int parent = op.beam[row];
  const bool below_root = op.first == 1, mapped = drafted.token >= 0 && op.token_ids != nullptr;
  const int token = !mapped ? drafted.token : drafted.token < op.ids ? op.token_ids[drafted.token] : -1;
  const float above = below_root ? 0.0f : op.scores[own + parent];
  const int parent_depth = below_root ? 0 : op.depths[own + parent];
  const int depth = !known || token < 0 || parent_depth < 0 ? -1 : parent_depth + 1;
  return {token, parent, depth, above + drafted.score};
}

// Makes candidate i of the level row `place` of the next pass.
template <typename Best>
__device__ void open_row(const Growth& op, int b, int i, int place, bool known, const Best& best) {
  const Child child = child_of(op, b, i, known, best);
  const int64_t before = static_cast<int64_t>(b) * op.width + i / op.children;
  const int64_t row = static_cast<int64_t>(b) * op.next + place;
  const bool used = child.depth >= 0;
  const int node = op.first_node + place;
  op.next_beam[row] = op.first + i, op.next_tokens[row] = used ? child.token : -1, op.next_depths[row] = child.depth;
  op.next_above[row] = op.origin == nullptr ? before : op.origin[before];
#pragma unroll 1
  for (int w = 0; w < op.words; ++w) {
    const unsigned own = node / 32 == w ? 1u << node % 32 : 0u;
    op.next_bits[row * op.words + w] = used ? op.above_bits[before * op.words + w] | own : 0u;
  }
}

// Writes the level of request b and the rows behind it; the whole block calls it.
// best(row, j): child j of one of the request's rows before.  keys: shared, one for each entry of the level.
template <typename Best>
__device__ void grow_level(const Growth& op, int b, unsigned* keys, const Best& best) {
  const int level = op.width * op.children, threads = static_cast<int>(blockDim.x);
  const bool known = op.known[b] > 0;
  const int64_t own = static_cast<int64_t>(b) * op.columns;
  for (int i = threadIdx.x; i < level; i += threads) {
    const Child child = child_of(op, b, i, known, best);
    const int64_t column = own + op.first + i;
    op.tokens[column] = child.token, op.parents[column] = child.parent, op.depths[column] = child.depth;
    op.scores[column] = child.score;
    keys[i] = key_of(child.score);
  }
  if (op.first == 1 && threadIdx.x == 0) {
    op.tokens[own] = op.roots[b], op.parents[own] = -1, op.depths[own] = 0, op.scores[own] = 0.0f;
  }
  if (op.next == 0) return;
  if (op.order != nullptr) {
    for (int place = threadIdx.x; place < op.next; place += threads) {
      open_row(op, b, min(max(op.order[place], 0), level - 1), place, known, best);
    }
    return;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < level; i += threads) {
    const unsigned key = keys[i];
    int better = 0;
#pragma unroll 4
    for (int j = 0; j < level; ++j) better += keys[j] > key || (keys[j] == key && j < i);
    if (better < op.next) open_row(op, b, i, better, known, best);
  }
}

}  // namespace specengine
