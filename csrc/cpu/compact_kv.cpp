// One task owns one layer and moves rows in path order, so overlapping moves are safe.
#include "ops/compact_kv.h"

#include <cstring>

#include "cpu/parallel_for.h"

namespace specengine::SPECENGINE_ISA {
namespace {

void check_paths(const CompactKv& op) {
  const int64_t B = op.lengths.shape[0], N = op.path.shape[1], pages = op.block_table.shape[1];
  for (int64_t b = 0; b < B; ++b) {
    const int32_t* path = op.path.as<int32_t>() + b * N;
    const int64_t count = op.path_length.as<int32_t>()[b], length = op.lengths.as<int32_t>()[b];
    if (count < 0 || count > N) fail("path_length: entry ", b, " is ", count, ", expected 0 to ", N);
    if (length < 0) fail("lengths: entry ", b, " is negative");
    for (int64_t j = 0; j < count; ++j) {
      if (path[j] < j || path[j] >= kMaxNodes || (j > 0 && path[j] <= path[j - 1])) {
        fail("path: entry [", b, ", ", j, "] is ", path[j], ", expected ascending node indices below ", kMaxNodes);
      }
    }
    if (count == 0) continue;
    const int64_t last_page = (length + path[count - 1]) / kPageSize;
    if (last_page >= pages) fail("block_table: request ", b, " needs ", last_page + 1, " pages, has ", pages);
    for (int64_t p = length / kPageSize; p <= last_page; ++p) {
      const int32_t page = op.block_table.as<int32_t>()[b * pages + p];
      if (page < 0 || page >= op.k_cache.shape[1]) {
        fail("block_table: page ", page, " of request ", b, " is not in 0 to ", op.k_cache.shape[1] - 1);
      }
    }
  }
}

}  // namespace

void run(const CompactKv& op) {
  check_paths(op);
  const int64_t layers = op.k_cache.shape[0], P = op.k_cache.shape[1], K = op.k_cache.shape[2], D = op.k_cache.shape[4];
  const int64_t B = op.lengths.shape[0], N = op.path.shape[1], max_pages = op.block_table.shape[1];
  const int64_t row_bytes = D * (op.k_cache.dtype == DType::kFloat32 ? 4 : 2), head_bytes = kPageSize * row_bytes;
  parallel_for(layers, [&](int64_t layer) {
    for (int64_t b = 0; b < B; ++b) {
      const int32_t* table = op.block_table.as<int32_t>() + b * max_pages;
      const int32_t* path = op.path.as<int32_t>() + b * N;
      const int64_t length = op.lengths.as<int32_t>()[b];
      const auto row = [&](int64_t slot) {
        return (layer * P + table[slot / kPageSize]) * K * head_bytes + slot % kPageSize * row_bytes;
      };
      for (int64_t j = 0; j < op.path_length.as<int32_t>()[b]; ++j) {
        if (path[j] == j) continue;
        const int64_t from = row(length + path[j]), to = row(length + j);
        for (const TensorView* cache : {&op.k_cache, &op.v_cache}) {
          for (int64_t h = 0; h < K; ++h) {
            std::memcpy(cache->as<char>() + to + h * head_bytes, cache->as<char>() + from + h * head_bytes, row_bytes);
          }
        }
      }
    }
  });
}

}  // namespace specengine::SPECENGINE_ISA
