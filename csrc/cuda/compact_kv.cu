// A block owns one layer of one sequence; a thread owns one (cache, head, element) and carries it along the path in
// order. Rows move towards the front (path[j] >= j), and every thread reads its element before a later step of its own
// can overwrite it, so overlapping moves need neither a temporary nor a barrier.
#include <cuda_runtime.h>

#include "ops/compact_kv.h"

namespace specengine {
namespace {

constexpr int kThreads = 256;

template <typename Element>
__global__ void compact_kv_kernel(Element* k, Element* v, const int* block_table, const int* lengths, const int* path,
                                  const int* path_length, int64_t pages, int heads, int dim, int max_pages,
                                  int max_path) {
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
void launch(const CompactKv& op) {
  const dim3 grid(static_cast<unsigned>(op.k.shape[0]), static_cast<unsigned>(op.lengths.shape[0]));
  compact_kv_kernel<Element><<<grid, kThreads, 0, static_cast<cudaStream_t>(op.k.stream)>>>(
      op.k.as<Element>(), op.v.as<Element>(), op.block_table.as<int>(), op.lengths.as<int>(), op.path.as<int>(),
      op.path_length.as<int>(), op.k.shape[1], static_cast<int>(op.k.shape[2]), static_cast<int>(op.k.shape[4]),
      static_cast<int>(op.block_table.shape[1]), static_cast<int>(op.path.shape[1]));
}

}  // namespace

void run_cuda(const CompactKv& op) {
  if (op.k.shape[0] == 0 || op.lengths.shape[0] == 0) return;
  int previous = 0;
  cudaGetDevice(&previous);
  cudaSetDevice(op.k.device_id);
  op.k.dtype == DType::kFloat32 ? launch<float>(op) : launch<uint16_t>(op);
  const cudaError_t error = cudaGetLastError();
  cudaSetDevice(previous);
  if (error != cudaSuccess) throw std::runtime_error(std::string("compact_kv: ") + cudaGetErrorString(error));
}

}  // namespace specengine
