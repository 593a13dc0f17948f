// A warp owns one request; its lanes share the nodes. Floor: a few hundred integers per request.
#include "ops/commit_tokens.h"

#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"

namespace specengine {
namespace {

struct Pointers {
  const int *tokens, *parents, *path;
  int* path_length;
  const int *bonus, *relaxed, *eos, *ignores_eos, *final_length;
  int *history, *history_length, *cached, *active, *record;
  int nodes, capacity, eos_count;
};

__global__ void __launch_bounds__(kWarp) commit_tokens_kernel(Pointers p) {
  wait_for_previous_kernel();
  const int64_t b = blockIdx.x;
  const int lane = threadIdx.x;
  const int* tokens = p.tokens + b * p.nodes;
  const int* path = p.path + b * p.nodes;
  const bool active = p.active[b] != 0;
  const int count = active ? p.path_length[b] : 0, bonus = active ? p.bonus[b] : -1, length = p.history_length[b];

  // The i-th token of the run: accepted ones, then the bonus token.
  const auto token_at = [&](int i) { return i + 1 < count ? tokens[path[i + 1]] : bonus; };
  int kept = bonus < 0 ? 0 : count, ended = bonus < 0;
  for (int i = lane; i < kept; i += kWarp) {
    bool ends = length + i + 1 >= p.final_length[b];
    for (int e = 0; e < p.eos_count && !ends; ++e) ends = !p.ignores_eos[b] && token_at(i) == p.eos[e];
    if (ends) kept = i + 1, ended = 1;
  }
  kept = warp_reduce<Min>(kept), ended = warp_reduce<Max>(ended);
  for (int i = lane; i < kept; i += kWarp) p.history[b * p.capacity + length + i] = token_at(i);

  int* record = p.record + b * (kRecordHead + 3 * p.nodes);
  int* tree = record + kRecordHead;
  for (int i = lane; i < p.nodes; i += kWarp) {
    tree[i] = path[i], tree[p.nodes + i] = tokens[i];
    tree[2 * p.nodes + i] = p.parents[b * p.nodes + i];
  }
  __syncwarp();  // every lane has read what lane 0 writes now
  if (lane == 0) {
    record[0] = kept, record[1] = count, record[2] = bonus, record[3] = active ? p.relaxed[b] : 0;
    p.path_length[b] = kept;
    if (active) p.history_length[b] = length + kept, p.cached[b] += kept, p.active[b] = !ended;
  }
}

}  // namespace

void run_cuda(const CommitTokens& op) {
  if (op.accepted.path.shape[0] == 0) return;
  const DeviceGuard guard(op.accepted.path.device_id);
  const Pointers pointers{op.tokens.as<int>(),
                          op.parents.as<int>(),
                          op.accepted.path.as<int>(),
                          op.accepted.path_length.as<int>(),
                          op.accepted.bonus.as<int>(),
                          op.accepted.relaxed.as<int>(),
                          op.eos.as<int>(),
                          op.ignores_eos.as<int>(),
                          op.final_length.as<int>(),
                          op.history.as<int>(),
                          op.history_length.as<int>(),
                          op.cached.as<int>(),
                          op.active.as<int>(),
                          op.record.as<int>(),
                          static_cast<int>(op.accepted.path.shape[1]),
                          static_cast<int>(op.history.shape[1]),
                          static_cast<int>(op.eos.shape[0])};
  launch({"commit_tokens", dim3(static_cast<unsigned>(op.accepted.path.shape[0])), dim3(kWarp), 0,
          op.accepted.path.stream},
         commit_tokens_kernel, pointers);
}

}  // namespace specengine
