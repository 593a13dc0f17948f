// Tree attention: tensor cores for 16-bit caches, float32 arithmetic in the order of positions for float32 caches and
// strict mode. If the keys are split, the last block of every tile merges the splits in order (merge_splits.cuh).
#include "ops/tree_attention.h"

#include <algorithm>

#include "cuda/attention/prefetch.cuh"

namespace specengine {
namespace attention {
namespace {

constexpr int kMaxSplits = 64;           // on tensor cores
constexpr int kWideShared = 111 * 1024;  // bytes of a block of kWidePairs pairs of more than 96 columns

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
            .arrived = op.arrived.as<int>(),
            .upcoming = op.upcoming.as<char>(),
            .upcoming_lines = 0,
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
            .exact = op.strict || cache.k_cache.dtype == DType::kFloat32,
            .group = static_cast<int>(group)};
  if (a.exact) {
    a.tile_pairs = mean_pairs <= 8 ? 8 : 32;
    a.splits = split_of(static_cast<int>(pages * kPageSize) - 1) + 1;
  } else {
    const int device = op.q.device_id;
    const bool wide_fits = cache.dim() <= 96 || most_shared_bytes(device) >= kWideShared;
    const int large = mean_pairs > 64 && wide_fits ? kWidePairs : 64;
    a.tile_pairs = cache.dim() > 128 ? 32 : mean_pairs <= 16 ? 16 : mean_pairs <= 32 ? 32 : large;
    a.least_pages = std::min(4, a.tile_pairs / 16);
    // Wide tiles: a block per multiprocessor, as more splits would move more sums than they save waiting.
    const int blocks_at_once = (a.tile_pairs == kWidePairs ? 1 : 2) * multiprocessors(device);
    const int64_t blocks = std::max<int64_t>(1, B * ((mean_pairs + a.tile_pairs - 1) / a.tile_pairs) * cache.heads());
    const int64_t most = std::min<int64_t>(pages, kMaxSplits);
    a.splits = static_cast<int>(std::clamp<int64_t>(blocks_at_once / blocks, 1, most));
  }
  a.tiles = static_cast<int>((M * group + B * (a.tile_pairs - 1)) / a.tile_pairs);
  if (op.upcoming.defined()) {
    const int64_t blocks = static_cast<int64_t>(a.tiles) * a.K * a.splits;
    a.upcoming_lines = lines_to_prefetch(bytes_of(op.upcoming), l2_bytes(op.q.device_id), blocks);
  }
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
  // As many as there may be tiles of a pair each.
  const int64_t counters = floats > 0 ? a.pairs : 0, counted = op.arrived.defined() ? op.arrived.shape[0] : 0;
  if (counted < counters) fail("arrived: expected at least ", counters, " counters, got ", counted);
  check_aligned(op.q, "q"), check_aligned(op.out, "out"), check_aligned(op.workspace, "workspace");
  check_aligned(op.cache.k_cache, "k_cache"), check_aligned(op.cache.v_cache, "v_cache");
  const DeviceGuard guard(op.q.device_id);
  const DType cache = op.cache.k_cache.dtype;
  if (a.exact) return attend_exactly(a, cache, op.q.stream);
  cache == DType::kBFloat16 ? attend_on_tensor_cores<BFloat16>(a, op.q.stream)
                            : attend_on_tensor_cores<Half>(a, op.q.stream);
}

}  // namespace specengine
