// A thread owns one 16-byte column of the rows of one (layer, cache, head), or one element if a row is no whole number
// of 16 bytes, and moves it along the path. A lane of its warp finds the addresses of one step of the path.
//
// Overlapping moves need neither a temporary nor a barrier. Step j moves slot path[j] to slot j of the nodes, and
// path[j] >= j since the path ascends. Only step path[j], of the same thread, could overwrite the row that step j
// reads. That is step j itself (the row is in place) or a later step. Loading several steps before storing them keeps
// that order.
#include "ops/compact_kv.h"

#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 128;
constexpr int kSteps = 8;  // of the path whose loads are under way together

template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    compact_kv_kernel(Vector* k, Vector* v, const int* block_table, const int* lengths, const int* path,
                      const int* path_length, int64_t pages, int layers, int heads, int columns, int max_pages,
                      int max_path) {
  wait_for_previous_kernel();
  const int b = blockIdx.y, lane = threadIdx.x % kWarp;
  const int count = path_length[b], length = lengths[b];
  const int64_t head_vectors = kPageSize * columns, page_vectors = heads * head_vectors;

  const int i = blockIdx.x * kThreads + threadIdx.x, row = i / columns, layer = row / heads / 2;
  const bool owns = layer < layers;  // a lane without a column still takes part in its warp's collectives
  Vector* own =
      (row / heads % 2 == 0 ? k : v) + layer * pages * page_vectors + row % heads * head_vectors + i % columns;

  for (int first = 0; first < count; first += kWarp) {
    const int step = first + lane;
    const int node = step < max_path ? path[static_cast<int64_t>(b) * max_path + step] : step;
    const bool moves = step < count && node != step;
    const unsigned moving = __ballot_sync(kAllLanes, moves);
    if (moving == 0) continue;
    const auto offset = [&](int slot) {
      const int64_t page = block_table[static_cast<int64_t>(b) * max_pages + slot / kPageSize];
      return page * page_vectors + slot % kPageSize * columns;
    };
    const int64_t from = moves ? offset(length + node) : 0, to = moves ? offset(length + step) : 0;
    for (int s = __ffs(moving) - 1; s < kWarp - __clz(moving); s += kSteps) {
      Vector rows[kSteps];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int64_t source = __shfl_sync(kAllLanes, from, (s + j) % kWarp);
        if (owns && s + j < kWarp && (moving >> (s + j) & 1) != 0) rows[j] = own[source];
      }
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int64_t target = __shfl_sync(kAllLanes, to, (s + j) % kWarp);
        if (owns && s + j < kWarp && (moving >> (s + j) & 1) != 0) own[target] = rows[j];
      }
    }
  }
}

template <typename Vector>
void launch_for(const CompactKv& op, int64_t row_bytes) {
  const int layers = static_cast<int>(op.k_cache.shape[0]), heads = static_cast<int>(op.k_cache.shape[2]);
  const int columns = static_cast<int>(row_bytes / sizeof(Vector));
  const int64_t blocks = (static_cast<int64_t>(layers) * 2 * heads * columns + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(op.lengths.shape[0]));
  launch({"compact_kv", grid, kThreads, 0, op.k_cache.stream}, compact_kv_kernel<Vector>, op.k_cache.as<Vector>(),
         op.v_cache.as<Vector>(), op.block_table.as<int>(), op.lengths.as<int>(), op.path.as<int>(),
         op.path_length.as<int>(), op.k_cache.shape[1], layers, heads, columns,
         static_cast<int>(op.block_table.shape[1]), static_cast<int>(op.path.shape[1]));
}

}  // namespace

void run_cuda(const CompactKv& op) {
  if (op.k_cache.numel() == 0 || op.lengths.shape[0] == 0) return;
  const DeviceGuard guard(op.k_cache.device_id);
  const int64_t element = op.k_cache.dtype == DType::kFloat32 ? 4 : 2, row_bytes = op.k_cache.shape[4] * element;
  const auto starts = reinterpret_cast<uintptr_t>(op.k_cache.data) | reinterpret_cast<uintptr_t>(op.v_cache.data);
  if (row_bytes % 16 == 0 && starts % 16 == 0) return launch_for<uint4>(op, row_bytes);
  element == 4 ? launch_for<uint32_t>(op, row_bytes) : launch_for<uint16_t>(op, row_bytes);
}

}  // namespace specengine
