// Skinny GEMM with a weight in codes: reads it once for up to 64 rows of x.
#include "ops/coded/linear.h"

#include "cuda/layer/coded_product.cuh"

namespace specengine {
namespace {

// Three blocks of the plan for few rows fit on a multiprocessor. Asked for nothing, nvcc spills in other plans.
template <CodedKind kKind, CodedValue kValue, int kRows, int kGroups>
__global__ void __launch_bounds__(kCodedWarps* kWarp, kRows == 16 ? 3 : 1)
    coded_linear_kernel(const BFloat16* x, const unsigned char* weight, CodedChunk form, Result result, int columns) {
  let_next_kernel_start();
  SPECENGINE_DYNAMIC_SHARED(uint4, ring);
  const int x_tiles = (result.rows + kGroups * kGroup - 1) / (kGroups * kGroup);
  const int first_x_row = blockIdx.x % x_tiles * kGroups * kGroup;  // blocks that share weights are neighbours
  const int first_row = blockIdx.x / x_tiles * kRows;
  const auto x_offset_of = [&](int i) { return static_cast<int64_t>(min(i, result.rows - 1 - first_x_row)) * columns; };
  multiply_codes<kKind, kValue, kRows, kGroups>(x + static_cast<int64_t>(first_x_row) * columns, x_offset_of, weight,
                                                form, result, columns, first_x_row, first_row, ring,
                                                [] { wait_for_its_data(); });
}

struct Product {
  const char* name;
  const TensorView &x, &weight;
  CodedChunk form;
  Result result;
};

template <CodedKind kKind, CodedValue kValue, int kRows, int kGroups>
void launch_plan(const Product& p) {
  using P = CodedPlan<kKind, kRows, kGroups>;
  const int64_t blocks = (p.result.columns + kRows - 1) / kRows;
  const int64_t x_tiles = (p.x.shape[0] + kGroups * kGroup - 1) / (kGroups * kGroup);
  launch({p.name, static_cast<unsigned>(blocks * x_tiles), P::kThreads,
          static_cast<size_t>(P::kStages * kCodedWarps * P::kTiles * p.form.bytes), p.weight.stream},
         coded_linear_kernel<kKind, kValue, kRows, kGroups>, p.x.as<BFloat16>(), p.weight.as<unsigned char>(), p.form,
         p.result, static_cast<int>(p.x.shape[1]));
}

// The more rows of x, the more rows of the weight must share what is read of x.
template <CodedKind kKind, CodedValue kValue>
void launch_kind(const Product& p) {
  constexpr int kMost = bits_of(kKind) == 4 ? 64 : 32;  // rows whose chunks fit into shared memory
  const int64_t M = p.x.shape[0];
  if (M <= 2) return launch_plan<kKind, kValue, 16, 1>(p);
  if (M <= 8) return launch_plan<kKind, kValue, 32, 1>(p);
  if (M <= 16) return launch_plan<kKind, kValue, kMost, 2>(p);
  if (M <= 32) return launch_plan<kKind, kValue, 32, 4>(p);
  launch_plan<kKind, kValue, 32, 8>(p);
}

void launch_any(const Product& p) {
  with_kind(p.form, [&](auto kind, auto value) { launch_kind<kind, value>(p); });
}

constexpr int kThreads = 128;

// A thread owns 8 columns of a row.
template <CodedKind kKind, CodedValue kValue>
__global__ void __launch_bounds__(kThreads) gather_coded_kernel(const unsigned char* weight, CodedChunk form,
                                                                const int* ids, float* out, int rows, int columns) {
  wait_for_previous_kernel();
  const int64_t m = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns, id = ids[m];
  if (column >= columns) return;
  float4 values[2] = {};
  if (id >= 0 && id < rows) {
    constexpr int kWords = kCodeWords<kKind>, kPieceBlocks = kBlocks / kWords;
    const int64_t chunks = (columns + kCodedColumns - 1) / kCodedColumns;
    const unsigned char* const chunk =
        weight + (id / kCodedRows * chunks + column / kCodedColumns) * static_cast<int64_t>(form.bytes);
    const int row = id % kCodedRows, in_chunk = column % kCodedColumns, block = in_chunk / (kQuad * kColumns);
    const int piece = row / kGroup * kWords + block / kPieceBlocks;
    const int lane = row % kGroup * kQuad + in_chunk / kColumns % kQuad;
    const unsigned* const from =
        reinterpret_cast<const unsigned*>(chunk + (piece * kWarp + lane) * kPieceBytes) + block % kPieceBlocks * kWords;
    unsigned words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = from[w];
    CodedGroup group[1];
    load_groups<kKind, kValue>(group, chunk, form, row, in_chunk);
    float eight[kColumns];
    values_of<kKind, kValue>(eight, words, group[0]);
    values[0] = {eight[0], eight[1], eight[2], eight[3]}, values[1] = {eight[4], eight[5], eight[6], eight[7]};
  }
  float4* const to = reinterpret_cast<float4*>(out + m * columns + column);
  to[0] = values[0], to[1] = values[1];
}

}  // namespace

void run_cuda(const CodedLinear& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0 || op.rows == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() + op.first : nullptr;
  const Result result{bias,    op.out.as<float>() + op.first, op.out.shape[1],
                      nullptr, static_cast<int>(M),           static_cast<int>(op.rows)};
  launch_any({"coded_linear", op.x, op.weight, op.form.chunk(), result});
}

void run_cuda(const CodedLinearArgmax& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() : nullptr;
  argmax_of_product("coded_linear_argmax", op.keys, op.ids, [&](long long* keys) {
    const Result result{bias, nullptr, 0, keys, static_cast<int>(M), static_cast<int>(op.rows)};
    launch_any({"coded_linear_argmax", op.x, op.weight, op.form.chunk(), result});
  });
}

void run_cuda(const GatherCoded& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const int columns = static_cast<int>(op.out.shape[1]), pieces = columns / kColumns;
  const dim3 grid(static_cast<unsigned>(op.ids.shape[0]), static_cast<unsigned>((pieces + kThreads - 1) / kThreads));
  const CodedChunk form = op.form.chunk();
  const int rows = static_cast<int>(op.weight.shape[0]) * kCodedRows;
  with_kind(form, [&](auto kind, auto value) {
    launch({"gather_coded", grid, kThreads, 0, op.weight.stream}, gather_coded_kernel<kind, value>,
           op.weight.as<unsigned char>(), form, op.ids.as<int>(), op.out.as<float>(), rows, columns);
  });
}

}  // namespace specengine
