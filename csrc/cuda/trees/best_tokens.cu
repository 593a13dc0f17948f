// A block owns one part of one row's vocabulary; the last block of a row to finish merges the parts. Floor: 4 V per
// row.
#include "ops/growth/best_tokens.h"

#include "cuda/base/last_block.cuh"
#include "cuda/trees/top_tokens.cuh"

namespace specengine {
namespace {

__global__ void __launch_bounds__(kTopThreads)
    top_tokens_kernel(TopParts op, int* tokens, float* log_probs, int* arrived) {
  SPECENGINE_SHARED(float4, room, kPart / 4);
  SPECENGINE_SHARED(uint64_t, best_of, kWarp);
  SPECENGINE_SHARED(float, scratch, kWarp);
  wait_for_previous_kernel();
  const int row = blockIdx.y;
  score_part(op, row, blockIdx.x, reinterpret_cast<float*>(room), best_of, scratch);
  if (!is_last_to_arrive(arrived + row, static_cast<int>(gridDim.x)) || threadIdx.x >= kWarp) return;
  int* const own = tokens + static_cast<int64_t>(row) * op.width;
  float* const own_log_probs = log_probs + static_cast<int64_t>(row) * op.width;
  merge_parts(op, row, own, own_log_probs);
  __syncwarp();
  const float first = own_log_probs[0];
  __syncwarp();
  if (first == first) return;
  for (int i = threadIdx.x; i < op.width; i += kWarp) own[i] = -1, own_log_probs[i] = 0;
}

}  // namespace

void run_cuda(const BestTokens& op) {
  const int64_t R = op.logits.shape[0];
  if (R == 0) return;
  const DeviceGuard guard(op.logits.device_id);
  const TopParts top = top_parts_of(op.logits, op.parts);
  const dim3 grid(static_cast<unsigned>(top.parts), static_cast<unsigned>(R));
  launch({"top_tokens", grid, kTopThreads, 0, op.logits.stream}, top_tokens_kernel, top, op.tokens.as<int>(),
         op.log_probs.as<float>(), op.parts.arrived.as<int>());
}

}  // namespace specengine
