// A block owns one part of the vocabulary of one row. The last block of a request to finish merges the parts, a warp
// per row, and grows the level (level_growth.cuh): a launch for what top_tokens and grow_level do in two.
#include "ops/growth/expand_level.h"

#include "cuda/base/last_block.cuh"
#include "cuda/trees/level_growth.cuh"
#include "cuda/trees/top_tokens.cuh"
#include "growth/shapes.h"

namespace specengine {
namespace {

static_assert(3 * kMaxCandidates <= kPart, "the room for scores holds a level later");

__global__ void __launch_bounds__(kTopThreads)
    expand_level_kernel(Growth op, TopParts top, LikeliestChildren children, int* arrived) {
  SPECENGINE_SHARED(float4, room, kPart / 4);
  SPECENGINE_SHARED(uint64_t, best_of, kWarp);
  SPECENGINE_SHARED(float, scratch, kWarp);
  wait_for_previous_kernel();
  float* const scores = reinterpret_cast<float*>(room);
  const int b = blockIdx.y, part = blockIdx.x % top.parts, row = blockIdx.x / top.parts;
  const int64_t first_row = static_cast<int64_t>(b) * op.width;
  const bool known = op.known[b] > 0;
  if (known) score_part(top, first_row + row, part, scores, best_of, scratch);

  if (!is_last_to_arrive(arrived + b, static_cast<int>(gridDim.x))) return;

  int* const tokens = reinterpret_cast<int*>(room);  // of all rows, k each
  float* const log_probs = scores + kMaxCandidates;
  unsigned* const keys = reinterpret_cast<unsigned*>(room) + 2 * kMaxCandidates;
  for (int r = threadIdx.x / kWarp; r < op.width && known; r += kTopWarps) {
    merge_parts(top, first_row + r, tokens + r * top.width, log_probs + r * top.width);
  }
  __syncthreads();
  grow_level(op, b, keys, [&](int r, int j) {
    if (!known) return Drafted{-1, 0.0f};
    return children.child(first_row + r, j, tokens + r * top.width, log_probs + r * top.width);
  });
}

}  // namespace

void run_cuda(const ExpandLevel& op) {
  const int64_t B = op.roots.shape[0], rows = op.parts.sums.shape[0];
  if (B == 0) return;
  const DeviceGuard guard(op.roots.device_id);
  const LevelLogits& level = op.level;
  const TopParts top{level.logits.as<float>(),
                     level.delta.as<float>(),
                     static_cast<int>(rows / level.logits.shape[0]),
                     op.parts.tokens.as<int>(),
                     op.parts.scores.as<float>(),
                     op.parts.sums.as<float>(),
                     static_cast<int>(level.logits.shape[1]),
                     static_cast<int>(op.parts.sums.shape[1]),
                     static_cast<int>(op.parts.tokens.shape[2])};
  const dim3 grid(static_cast<unsigned>(op.before.beam.shape[1] * top.parts), static_cast<unsigned>(B));
  launch({"expand_level", grid, kTopThreads, 0, op.roots.stream}, expand_level_kernel, growth_of(op, top.width), top,
         children_of(level, rows), op.parts.arrived.as<int>());
}

}  // namespace specengine
