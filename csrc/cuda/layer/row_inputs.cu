// A block owns a row. Floor: what it reads and writes, once.
#include "ops/growth/row_inputs.h"

#include <algorithm>

#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"

namespace specengine {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kFours = 4;  // of a thread, as in rms_norm.cu: one order of the sum

struct Join {
  const void* left;
  const int* ids;
  const float* right;
  const int64_t* above;
  const float *left_norm, *right_norm;
  float* stream;
  void* out;
  int64_t left_rows;
  int left_columns, right_columns, shared;  // rows that share one of left, where there are no ids
  bool norms_stream;
  float eps;
};

// 1 / sqrt(mean of squares + eps) of a row, added up as rms_norm does. The whole block calls it.
template <typename Row>
__device__ float scale_of(const Row* row, int columns, float eps, float* scratch) {
  float sum = 0;
  for (int c = 4 * threadIdx.x; c < columns; c += 4 * blockDim.x) {
    const auto at = [&](int i) { return c + i < columns && row != nullptr ? to_float(row[c + i]) : 0.0f; };
    const float x = at(0), y = at(1), z = at(2), w = at(3);
    sum = fmaf(x, x, fmaf(y, y, fmaf(z, z, fmaf(w, w, sum))));
  }
  return 1.0f / sqrtf(block_reduce<Sum>(sum, scratch) / static_cast<float>(columns) + eps);
}

template <typename Left, typename Out>
__global__ void __launch_bounds__(kMostThreads) join_rows_kernel(Join op) {
  SPECENGINE_SHARED(float, scratch, kWarp);
  wait_for_previous_kernel();
  const int64_t m = blockIdx.x, id = op.ids == nullptr ? m / op.shared : op.ids[m];
  const bool there = id >= 0 && id < op.left_rows;
  const Left* left = there ? static_cast<const Left*>(op.left) + id * op.left_columns : nullptr;
  const float* right = op.right + (op.above == nullptr ? m : op.above[m]) * op.right_columns;
  Out* out = static_cast<Out*>(op.out) + m * (op.left_columns + op.right_columns);
  float scale = op.left_norm == nullptr ? 1.0f : scale_of(left, op.left_columns, op.eps, scratch);
  for (int c = threadIdx.x; c < op.left_columns; c += blockDim.x) {
    const float x = there ? to_float(left[c]) : 0.0f;
    out[c] = from_float<Out>(op.left_norm == nullptr ? x : x * scale * op.left_norm[c]);
  }
  scale = op.right_norm == nullptr ? 1.0f : scale_of(right, op.right_columns, op.eps, scratch);
  for (int c = threadIdx.x; c < op.right_columns; c += blockDim.x) {
    const float x = right[c], y = op.right_norm == nullptr ? x : x * scale * op.right_norm[c];
    out[op.left_columns + c] = from_float<Out>(y);
    if (op.stream != nullptr) op.stream[m * op.right_columns + c] = op.norms_stream ? y : x;
  }
}

// As many as rms_norm has for the wider part.
int threads_for(int columns) {
  const int fours = (columns + 3) / 4;
  const int wanted = std::max(std::min(fours, 256), (fours + kFours - 1) / kFours);
  return std::min((wanted + kWarp - 1) / kWarp * kWarp, kMostThreads);
}

}  // namespace

void run_cuda(const JoinRows& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.out.device_id);
  const int64_t rows = op.out.shape[0], left = op.left.shape[0];
  const Join join{op.left.data,
                  op.ids.as<int>(),
                  op.right.as<float>(),
                  op.above.as<int64_t>(),
                  op.left_norm.as<float>(),
                  op.right_norm.as<float>(),
                  op.stream.as<float>(),
                  op.out.data,
                  left,
                  static_cast<int>(op.left.shape[1]),
                  static_cast<int>(op.right.shape[1]),
                  op.ids.given() ? 1 : static_cast<int>(rows / left),
                  op.norms_stream,
                  op.eps};
  const int threads = threads_for(std::max(join.left_columns, join.right_columns));
  with_float_type(op.left.dtype, [&](auto from) {
    with_float_type(op.out.dtype, [&](auto to) {
      launch({"join_rows", static_cast<unsigned>(rows), threads, 0, op.out.stream},
             join_rows_kernel<decltype(from), decltype(to)>, join);
    });
  });
}

}  // namespace specengine
