// Sorts pairs by expert. A warp owns one expert: it counts the pairs of the experts before, then places its own in
// their order. Nothing is added atomically, and no warp waits for another.
#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/experts/experts.h"

namespace specengine {
namespace {

constexpr int kWarps = 8;

// The expert after the last one has no pairs: its start is the number of all.
__global__ void __launch_bounds__(kWarps* kWarp)
    group_pairs_kernel(const int* chosen, int* starts, int* rows, int* places, int pairs, int per_token, int experts) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarp, expert = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (expert > experts) return;
  int place = 0;
#pragma unroll 4
  for (int first = 0; first < pairs; first += kWarp) {
    const int pair = first + lane;
    place += __popc(__ballot_sync(kAllLanes, pair < pairs && chosen[pair] < expert));
  }
  if (lane == 0) starts[expert] = place;
  if (expert == experts) return;
#pragma unroll 4
  for (int first = 0; first < pairs; first += kWarp) {
    const int pair = first + lane;
    const bool own = pair < pairs && chosen[pair] == expert;
    const unsigned all = __ballot_sync(kAllLanes, own);
    if (own) {
      const int at = place + __popc(all & ((1u << lane) - 1));
      rows[at] = pair / per_token;
      places[pair] = at;
    }
    place += __popc(all);
  }
}

}  // namespace

void run_cuda(const GroupPairs& op) {
  const int pairs = static_cast<int>(op.experts.numel()), per_token = static_cast<int>(op.experts.shape[1]);
  const int experts = static_cast<int>(op.num_experts());
  const DeviceGuard guard(op.experts.device_id);
  const unsigned blocks = (experts + 1 + kWarps - 1) / kWarps;
  launch({"group_pairs", blocks, kWarps * kWarp, 0, op.experts.stream}, group_pairs_kernel, op.experts.as<int>(),
         op.starts.as<int>(), op.rows.as<int>(), op.places.as<int>(), pairs, per_token, experts);
}

}  // namespace specengine
