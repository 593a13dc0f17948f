// Skinny GEMM: reads a weight once for up to 64 rows of x.
#include "ops/linear.h"

#include <utility>

#include "cuda/layer/float_product.cuh"

namespace specengine {
namespace {

template <typename Weight, int kRows, int kWarps, int kGroups>
__global__ void __launch_bounds__(kWarps* kWarp)
    linear_kernel(const Weight* x, const Weight* weight, Result result, int columns) {
  let_next_kernel_start();
  SPECENGINE_DYNAMIC_SHARED(uint4, ring);
  const int x_tiles = (result.rows + kGroups * kGroup - 1) / (kGroups * kGroup);
  const int first_x_row = blockIdx.x % x_tiles * kGroups * kGroup;  // blocks that share weights are neighbours
  const int first_row = blockIdx.x / x_tiles * kRows;
  const auto x_offset_of = [&](int i) { return min(i, result.rows - 1 - first_x_row) * columns; };
  multiply_floats<Weight, kRows, kWarps, kGroups>(x + static_cast<int64_t>(first_x_row) * columns, x_offset_of, weight,
                                                  result, columns, first_x_row, first_row, ring,
                                                  [] { wait_for_its_data(); });
}

struct Product {
  const char* name;
  const TensorView &x, &weight;
  int64_t variant;
  Result result;
};

template <typename Weight, int kRows, int kWarps, int kGroups>
void launch_groups(const Product& p) {
  using P = FloatPlan<Weight, kRows, kWarps, kGroups>;
  const int64_t blocks = (p.weight.shape[0] + kRows - 1) / kRows;
  const int64_t x_tiles = (p.x.shape[0] + kGroups * kGroup - 1) / (kGroups * kGroup);
  launch({p.name, static_cast<unsigned>(blocks * x_tiles), P::kThreads, P::kSharedBytes, p.weight.stream},
         linear_kernel<Weight, kRows, kWarps, kGroups>, p.x.as<Weight>(), p.weight.as<Weight>(), p.result,
         static_cast<int>(p.weight.shape[1]));
}

template <typename Weight, int kRows, int kWarps>
void launch_variant(const Product& p) {
  if constexpr (sizeof(Weight) == 4) {
    launch_groups<Weight, kRows, kWarps, 1>(p);
  } else {
    const int64_t M = p.x.shape[0];
    if (M <= 8) return launch_groups<Weight, kRows, kWarps, 1>(p);
    if (M <= 16) return launch_groups<Weight, kRows, kWarps, 2>(p);
    if (M <= 32) return launch_groups<Weight, kRows, kWarps, 4>(p);
    launch_groups<Weight, kRows, kWarps, 8>(p);
  }
}

template <typename Weight, size_t... kPlace>
void launch_chosen(const Product& p, std::index_sequence<kPlace...>) {
  const size_t chosen = p.variant == 0 ? 0 : static_cast<size_t>(p.variant - 1);
  ((chosen == kPlace ? launch_variant<Weight, kLinearVariants[kPlace].rows, kLinearVariants[kPlace].warps>(p) : void()),
   ...);
}

void launch_any(const Product& p) {
  constexpr std::make_index_sequence<std::size(kLinearVariants)> kPlaces;
  with_float_type(p.weight.dtype, [&](auto zero) { launch_chosen<decltype(zero)>(p, kPlaces); });
}

__global__ void forget_keys_kernel(long long* keys, int rows) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) keys[row] = kLeastKey;
}

__global__ void ids_of_keys_kernel(const long long* keys, int* ids, int rows) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) ids[row] = argmax_of(keys[row]);
}

}  // namespace

void forget_keys(const LaunchConfig& each_row, long long* keys, int rows) {
  launch(each_row, forget_keys_kernel, keys, rows);
}

void ids_of_keys(const LaunchConfig& each_row, const long long* keys, int* ids, int rows) {
  launch(each_row, ids_of_keys_kernel, keys, ids, rows);
}

void run_cuda(const Linear& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0 || op.rows == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() + op.first : nullptr;
  const Result result{bias,    op.out.as<float>() + op.first, op.out.shape[1],
                      nullptr, static_cast<int>(M),           static_cast<int>(op.rows)};
  launch_any({"linear", op.x, op.weight, op.variant, result});
}

void run_cuda(const LinearArgmax& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() : nullptr;
  argmax_of_product("linear_argmax", op.keys, op.ids, [&](long long* keys) {
    const Result result{bias, nullptr, 0, keys, static_cast<int>(M), static_cast<int>(op.rows)};
    launch_any({"linear_argmax", op.x, op.weight, op.variant, result});
  });
}

}  // namespace specengine
