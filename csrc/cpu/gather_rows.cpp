// The embedding lookup: rows out of a packed weight, as float32. A few rows, so one thread.
#include "cpu/block_column.h"
#include "cpu/simd.h"
#include "ops/packed_weight.h"

namespace specengine::SPECENGINE_ISA {
namespace {

template <typename Weight>
void gather(const GatherRows& op) {
  const int64_t M = op.ids.shape[0], C = op.out.shape[1];
  for (int64_t m = 0; m < M; ++m) {
    const int32_t id = op.ids.as<int32_t>()[m];
    const Weight* column = op.weight.as<Weight>() + id / kPanel * C * kPanel + id % kPanel;
    for (int64_t c = 0; c < C; ++c) op.out.as<float>()[m * C + c] = load1(column + c * kPanel);
  }
}

void gather_coded(const GatherRows& op) {
  const int64_t M = op.ids.shape[0], C = op.out.shape[1];
  for (int64_t m = 0; m < M; ++m) {
    float* out = op.out.as<float>() + m * C;
    for (int64_t b = 0; b < op.weight.shape[1]; ++b) {
      const BlockColumn column = block_column(op.weight, op.ids.as<int32_t>()[m], b);
      const int64_t columns = column.format.columns, begin = b * columns;
      for (int64_t c = 0; c < std::min(columns, C - begin); ++c) out[begin + c] = column.value(c);
    }
  }
}

}  // namespace

void run(const GatherRows& op) {
  check_ids(op.ids, "ids", op.weight.shape[0] * kPanel);
  if (op.weight.dtype == DType::kUInt8) return gather_coded(op);
  with_float_type(op.weight.dtype, [&](auto zero) { gather<decltype(zero)>(op); });
}

}  // namespace specengine::SPECENGINE_ISA
