// The matrix behind attention, brought to L2 while attention leaves memory idle. No kernel writes weights, so blocks
// ask for them before they wait for the kernel before.
#pragma once
#include <algorithm>

#include "cuda/attention/tree_attention.cuh"

namespace specengine::attention {

constexpr int64_t kLine = 128;          // bytes
constexpr int64_t kLinesPerThread = 8;  // a thread must not ask for long before it attends
// An eighth: each half of an H100's L2 may keep a copy of its own, keys and values pass through before the matrix is
// read, and attention that is short or bound by memory takes longer by these bytes.
constexpr int64_t kShareOfL2 = 8;

// How many lines of `bytes` bytes the blocks of a grid ask for.
inline int lines_to_prefetch(int64_t bytes, int64_t l2, int64_t blocks) {
  const int64_t lines = std::min((bytes + kLine - 1) / kLine, blocks * kThreads * kLinesPerThread);
  return static_cast<int>(std::min(lines, l2 / kShareOfL2 / kLine));
}

// In place of wait_for_previous_kernel().
__device__ inline void prefetch_and_wait(const Problem& a) {
  let_next_kernel_start();
  const int threads = gridDim.x * gridDim.y * gridDim.z * kThreads;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  for (int line = block * kThreads + threadIdx.x; line < a.upcoming_lines; line += threads) {
    prefetch_to_l2(a.upcoming + line * kLine);
  }
  wait_for_its_data();
}

}  // namespace specengine::attention
