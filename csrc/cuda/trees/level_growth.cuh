// A level of a growing tree, by one block per request. Its threads share the candidates of the level and count, for
// each, how many are better. Floor: the level's candidates once.
#pragma once
#include "cuda/base/arch.cuh"
#include "growth/select.h"
#include "ops/growth/grow_level.h"

namespace specengine {

// Writes the level of request b and the rows behind it; the whole block calls it.
// best(row, j): child j of one of the request's rows before.  keys: shared, one for each entry of the level.
template <typename Best>
__device__ void grow_level(const Growth& op, int b, unsigned* keys, const Best& best) {
  const int level = op.level, threads = static_cast<int>(blockDim.x);
  const bool known = op.known[b] > 0;
  for (int i = threadIdx.x; i < level; i += threads) keys[i] = add_child(op, b, i, known, best);
  if (op.first == 1 && threadIdx.x == 0) add_root(op, b);
  if (op.next == 0) return;
  if (op.order != nullptr) {
    for (int place = threadIdx.x; place < op.next; place += threads) {
      open_row(op, b, entry_of(op, place), place, known, best);
    }
    return;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < level; i += threads) {
    const unsigned key = keys[i];
    int better = 0;
#pragma unroll 4
    for (int j = 0; j < level; ++j) better += precedes(keys[j], j, key, i);
    if (better < op.next) open_row(op, b, i, better, known, best);
  }
}

}  // namespace specengine
