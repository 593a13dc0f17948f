// Moves the cache rows of the accepted path to the end of the prefix, for all layers, keys and values at once.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"

namespace specengine {

// Slot lengths[b] + path[b, j] becomes slot lengths[b] + j for j < path_length[b]. Path entries ascend, so a row is
// read before it is overwritten. The caller advances lengths afterwards.
struct CompactKv {
  TensorView k_cache;      // [layers, P, K, 64, D] float32 | bfloat16 | float16, written
  TensorView v_cache;      // as k_cache, written
  TensorView block_table;  // [B, max_pages] int32
  TensorView lengths;      // [B] int32
  TensorView path;         // [B, N] int32, ascending node indices
  TensorView path_length;  // [B] int32

  Device validate() const {
    Checker check;
    Dim layers{"layers"}, P{"P"}, K{"K"}, D{"D"}, B{"B"}, max_pages{"max_pages"}, N{"N"};
    check(k_cache, "k_cache", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {layers, P, K, kPageSize, D});
    check(v_cache, "v_cache", {k_cache.dtype}, {layers, P, K, kPageSize, D});
    check(block_table, "block_table", {DType::kInt32}, {B, max_pages});
    check(lengths, "lengths", {DType::kInt32}, {B});
    check(path, "path", {DType::kInt32}, {B, N});
    check(path_length, "path_length", {DType::kInt32}, {B});
    return check.device();
  }
};

SPECENGINE_CPU_OP(CompactKv)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const CompactKv&);
#endif

}  // namespace specengine
