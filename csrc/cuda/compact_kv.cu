// A block owns one layer of one sequence; a thread owns one (cache, head, element) and carries it along the path in
// order. Rows move towards the front (path[j] >= j), and every thread reads its element before a later step of its own
// can overwrite it, so overlapping moves need neither a temporary nor a barrier.
#include "ops/compact_kv.h"

#include "cuda/arch.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    compact_kv_kernel(Element* k, Element* v, const int* block_table, const int* lengths, const int* path,
                      const int* path_length, int64_t pages, int heads, int dim, int max_pages, int max_path) {
  wait_for_previous_kernel();
  const int64_t layer = blockIdx.x, b = blockIdx.y;
  const int count = path_length[b], length = lengths[b];
  const int64_t page_elements = static_cast<int64_t>(heads) * kPageSize * dim;
  const auto offset = [&](int slot, int head, int element) {
    const int64_t page = layer * pages + block_table[b * max_pages + slot / kPageSize];
    return page * page_elements + (static_cast<int64_t>(head) * kPageSize + slot % kPageSize) * dim + element;
  };
  for (int i = threadIdx.x; i < 2 * heads * dim; i += blockDim.x) {
    Element* cache = i < heads * dim ? k : v;
    const int head = i / dim % heads, element = i % dim;
    for (int j = 0; j < count; ++j) {
      const int from = path[b * max_path + j];
      if (from != j) cache[offset(length + j, head, element)] = cache[offset(length + from, head, element)];
    }
  }
}

template <typename Element>
void launch_for(const CompactKv& op) {
  const dim3 grid(static_cast<unsigned>(op.k.shape[0]), static_cast<unsigned>(op.lengths.shape[0]));
  launch({"compact_kv", grid, kThreads, 0, op.k.stream}, compact_kv_kernel<Element>, op.k.as<Element>(),
         op.v.as<Element>(), op.block_table.as<int>(), op.lengths.as<int>(), op.path.as<int>(),
         op.path_length.as<int>(), op.k.shape[1], static_cast<int>(op.k.shape[2]), static_cast<int>(op.k.shape[4]),
         static_cast<int>(op.block_table.shape[1]), static_cast<int>(op.path.shape[1]));
}

}  // namespace

void run_cuda(const CompactKv& op) {
  if (op.k.shape[0] == 0 || op.lengths.shape[0] == 0) return;
  const DeviceGuard guard(op.k.device_id);
  op.k.dtype == DType::kFloat32 ? launch_for<float>(op) : launch_for<uint16_t>(op);
}

}  // namespace specengine
