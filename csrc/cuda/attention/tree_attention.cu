// Tree attention: tensor cores for 16-bit caches, float32 arithmetic in the order of positions for float32 caches and
// strict mode. If the keys were split, a warp per (row, head) then merges the splits in order.
#include "ops/tree_attention.h"

#include <algorithm>

#include "cuda/attention/tree_attention.cuh"

namespace specengine {
namespace attention {
namespace {

constexpr int kMaxSplits = 64;           // on tensor cores
constexpr int kWideShared = 111 * 1024;  // bytes of a block of kWidePairs pairs of more than 96 columns

// A warp owns a pair, a lane four columns or twice four.
__global__ void __launch_bounds__(kThreads) merge_splits_kernel(const Problem a) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarp;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp, row = pair / a.H;
  if (pair >= a.pairs) return;
  int b = 0;
  for (int base = 0; base < a.B; base += kWarp) {
    b += __popc(__ballot_sync(kAllLanes, base + lane < a.B && a.row_start[base + lane + 1] <= row));
  }
  const int words = min(a.words, kMaskWords), length = a.lengths[b];
  const int nodes = warp_reduce<Sum>(lane < words ? __popc(a.ancestors[row * a.words + lane]) : 0);
  int first = 0, end = 0;  // the row's splits; none for padding
  if (nodes > 0 && a.exact) {
    const int last = length + nodes - 1;
    first = split_of(max(0, last - a.window + 1)), end = split_of(last) + 1;
  } else if (nodes > 0) {
    const PageShares shares = page_shares(a, length, a.first_node + a.row_start[b + 1] - a.row_start[b]);
    end = (shares.end - shares.first + shares.each - 1) / shares.each;
  }
  const float2* const outcomes = reinterpret_cast<const float2*>(a.parts + a.splits * a.pairs * a.D) + pair;
  const float sink = sink_of(a, static_cast<int>(pair - row * a.H));
  float highest = kNoScore;
  for (int split = first + lane; split < end; split += kWarp) highest = fmaxf(highest, outcomes[split * a.pairs].x);
  highest = warp_reduce<Max>(highest);
  for (int column = lane * 4; column < a.D; column += kWarp * 4) {
    float total = 0, sum[4] = {};
#pragma unroll 16
    for (int split = first; split < end; ++split) {  // one at a time waits for L2 at each
      const float2 outcome = outcomes[split * a.pairs];
      const float4 part = *reinterpret_cast<const float4*>(a.parts + (split * a.pairs + pair) * a.D + column);
      const float weight = weight_of(outcome.x, highest);
      total = fmaf(weight, outcome.y, total);
      sum[0] = fmaf(weight, part.x, sum[0]), sum[1] = fmaf(weight, part.y, sum[1]);
      sum[2] = fmaf(weight, part.z, sum[2]), sum[3] = fmaf(weight, part.w, sum[3]);
    }
    finish(a, pair, column, sum, highest, total, sink);
  }
}

Problem problem_of(const TreeAttention& op) {
  const KvCacheView& cache = op.cache;
  const int64_t M = op.q.shape[0], H = op.q.shape[1], group = H / cache.heads(),
                B = std::max<int64_t>(1, cache.requests());
  const int64_t mean_pairs = (M + B - 1) / B * group;  // of a request
  const int64_t pages = std::max<int64_t>(1, cache.block_table.shape[1]), unlimited = 1 << 30;
  Problem a{.q = op.q.as<float>(),
            .k = cache.k_cache.data,
            .v = cache.v_cache.data,
            .block_table = cache.block_table.as<int>(),
            .lengths = cache.lengths.as<int>(),
            .row_start = cache.row_start.as<int>(),
            .ancestors = op.ancestors.as<unsigned>(),
            .sinks = op.sinks.defined() ? op.sinks.as<float>() : nullptr,
            .out = op.out.data,
            .out_type = op.out.dtype,
            .parts = op.workspace.as<float>(),
            .scale = op.scale * kLog2e,
            .window = static_cast<int>(op.window > 0 ? std::min(op.window, unlimited) : unlimited),
            .B = static_cast<int>(cache.requests()),
            .H = static_cast<int>(H),
            .K = static_cast<int>(cache.heads()),
            .D = static_cast<int>(cache.dim()),
            .words = static_cast<int>(op.ancestors.shape[1]),
            .max_pages = static_cast<int>(cache.block_table.shape[1]),
            .first_node = static_cast<int>(cache.first_node),
            .pairs = M * H,
            .exact = op.strict || cache.k_cache.dtype == DType::kFloat32};
  if (a.exact) {
    a.tile_pairs = mean_pairs <= 8 ? 8 : 32;
    a.splits = split_of(static_cast<int>(pages * kPageSize) - 1) + 1;
  } else {
    const int device = op.q.device_id;
    const bool wide_fits = cache.dim() <= 96 || most_shared_bytes(device) >= kWideShared;
    const int large = mean_pairs > 64 && wide_fits ? kWidePairs : 64;
    a.tile_pairs = cache.dim() > 128 ? 32 : mean_pairs <= 16 ? 16 : mean_pairs <= 32 ? 32 : large;
    a.least_pages = a.tile_pairs <= 32 ? 1 : 2;
    // Wide tiles: a block per multiprocessor, as more splits would move more sums than they save waiting.
    const int blocks_at_once = (a.tile_pairs == kWidePairs ? 1 : 2) * multiprocessors(device);
    const int64_t blocks = std::max<int64_t>(1, B * ((mean_pairs + a.tile_pairs - 1) / a.tile_pairs) * cache.heads());
    const int64_t most = std::min<int64_t>(pages, kMaxSplits);
    a.splits = static_cast<int>(std::clamp<int64_t>(blocks_at_once / blocks, 1, most));
  }
  a.tiles = static_cast<int>((M * group + B * (a.tile_pairs - 1)) / a.tile_pairs);
  return a;
}

int64_t floats_of(const Problem& a) { return a.splits > 1 ? a.splits * a.pairs * (a.D + 2) : 0; }

}  // namespace
}  // namespace attention

int64_t workspace_floats(const TreeAttention& op) { return attention::floats_of(attention::problem_of(op)); }

void run_cuda(const TreeAttention& op) {
  using namespace attention;
  const int64_t D = op.cache.dim();
  if (!op.ancestors.defined()) fail("ancestors: expected the bits of every row on cuda, got None");
  if (D % 8 != 0 || D > 256) {
    fail("k_cache: expected a head dim that is a multiple of 8, at most 256, on cuda, got D=", D);
  }
  if (op.q.numel() == 0 || op.cache.requests() == 0) return;
  const Problem a = problem_of(op);
  const int64_t floats = floats_of(a), given = op.workspace.defined() ? op.workspace.shape[0] : 0;
  if (given < floats) fail("workspace: expected at least ", floats, " floats, got ", given);
  check_aligned(op.q, "q"), check_aligned(op.out, "out"), check_aligned(op.workspace, "workspace");
  check_aligned(op.cache.k_cache, "k_cache"), check_aligned(op.cache.v_cache, "v_cache");
  const DeviceGuard guard(op.q.device_id);
  const auto attend = a.exact ? attend_exactly : attend_on_tensor_cores;
  attend(a, op.cache.k_cache.dtype, op.q.stream);
  if (a.splits == 1) return;
  const auto blocks = static_cast<unsigned>((a.pairs + kWarps - 1) / kWarps);
  launch({"tree_attention", blocks, kThreads, 0, op.q.stream}, merge_splits_kernel, a);
}

}  // namespace specengine
