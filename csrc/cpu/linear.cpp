// Skinny GEMM. One task owns a few panels (16 output columns each) for all rows; a tile of up to 6 rows keeps its
// 6 x 16 sums in registers and walks C once. Every sum is one chain of fused multiply-adds in the order of C,
// whatever the number of rows: a row's result never depends on what it was computed with (M-invariance).
#include "ops/linear.h"

#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

constexpr int kTileRows = 6;  // 12 accumulators + 2 weights + 1 broadcast: all 16 vector registers of AVX2

template <int kRows, typename Weight>
void tile(const float* x, int64_t columns, const Weight* panel, const float* bias, float* out, int64_t out_stride,
          int64_t out_columns) {
  f32x8 sum[kRows][2] = {};
  for (int64_t c = 0; c < columns; ++c) {
    const f32x8 w0 = load8(panel + c * kPanel), w1 = load8(panel + c * kPanel + kLanes);
    for (int r = 0; r < kRows; ++r) {
      const f32x8 broadcast = splat(x[r * columns + c]);
      sum[r][0] = fmadd(broadcast, w0, sum[r][0]);
      sum[r][1] = fmadd(broadcast, w1, sum[r][1]);
    }
  }
  float padded_bias[kPanel] = {};
  if (bias != nullptr) std::memcpy(padded_bias, bias, out_columns * sizeof(float));
  for (int r = 0; r < kRows; ++r) {
    float result[kPanel];
    store8(result, sum[r][0] + load8(padded_bias));
    store8(result + kLanes, sum[r][1] + load8(padded_bias + kLanes));
    std::memcpy(out + r * out_stride, result, out_columns * sizeof(float));
  }
}

template <typename Weight, typename... Args>
void tile_of(int64_t rows, Args... args) {
  switch (rows) {
    case 1:
      return tile<1, Weight>(args...);
    case 2:
      return tile<2, Weight>(args...);
    case 3:
      return tile<3, Weight>(args...);
    case 4:
      return tile<4, Weight>(args...);
    case 5:
      return tile<5, Weight>(args...);
    case 6:
      return tile<6, Weight>(args...);
    default:
      __builtin_unreachable();
  }
}

template <typename Weight>
void linear(const Linear& op) {
  const int64_t M = op.x.shape[0], C = op.x.shape[1], N = op.out.shape[1], panels = op.weight.shape[0];
  if (M == 0) return;
  const int64_t tiles = (M + kTileRows - 1) / kTileRows;
  // About eight pieces per thread: enough to even out a disturbed core, few enough to keep the counter cold.
  const int64_t per_task = std::max<int64_t>(1, panels / (8 * num_threads()));
  parallel_for((panels + per_task - 1) / per_task, [&](int64_t task) {
    for (int64_t p = task * per_task; p < std::min(panels, (task + 1) * per_task); ++p) {
      const int64_t first = p * kPanel;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = M * t / tiles, end = M * (t + 1) / tiles;  // tiles of nearly equal height
        tile_of<Weight>(end - begin, op.x.as<float>() + begin * C, C, op.weight.as<Weight>() + p * C * kPanel,
                        op.bias.defined() ? op.bias.as<float>() + first : nullptr,
                        op.out.as<float>() + begin * N + first, N, std::min(kPanel, N - first));
      }
    }
  });
}

template <typename Row, typename Weight>
void pack(const PackLinear& op) {
  const int64_t R = op.rows.shape[0], C = op.rows.shape[1];
  // A task owns one panel: its 16 rows are read side by side, so every cache line of the panel is written once.
  const int64_t first_panel = op.first / kPanel, last_panel = (op.first + R - 1) / kPanel;
  if (R == 0) return;
  parallel_for(last_panel - first_panel + 1, [&](int64_t task) {
    const int64_t panel = first_panel + task;
    const int64_t begin = std::max(op.first, panel * kPanel), end = std::min(op.first + R, (panel + 1) * kPanel);
    Weight* out = op.packed.as<Weight>() + panel * C * kPanel + begin % kPanel;
    const Row* rows = op.rows.as<Row>() + (begin - op.first) * C;
    for (int64_t c = 0; c < C; ++c) {
      for (int64_t n = 0; n < end - begin; ++n) store1(out + c * kPanel + n, load1(rows + n * C + c));
    }
  });
}

template <typename Weight>
void pack_to(const PackLinear& op) {
  switch (op.rows.dtype) {
    case DType::kFloat32:
      return pack<float, Weight>(op);
    case DType::kBFloat16:
      return pack<bfloat16, Weight>(op);
    default:
      return pack<half, Weight>(op);
  }
}

template <typename Weight>
void gather(const GatherRows& op) {
  const int64_t M = op.ids.shape[0], C = op.out.shape[1], N = op.weight.shape[0] * kPanel;
  const int32_t* ids = op.ids.as<int32_t>();
  for (int64_t m = 0; m < M; ++m) {
    if (ids[m] < 0 || ids[m] >= N) fail("ids: entry ", m, " is ", ids[m], ", expected 0 to ", N - 1);
  }
  for (int64_t m = 0; m < M; ++m) {
    const Weight* column = op.weight.as<Weight>() + ids[m] / kPanel * C * kPanel + ids[m] % kPanel;
    for (int64_t c = 0; c < C; ++c) op.out.as<float>()[m * C + c] = load1(column + c * kPanel);
  }
}

}  // namespace

void run(const PackLinear& op) { op.packed.dtype == DType::kFloat32 ? pack_to<float>(op) : pack_to<bfloat16>(op); }
void run(const Linear& op) { op.weight.dtype == DType::kFloat32 ? linear<float>(op) : linear<bfloat16>(op); }
void run(const GatherRows& op) { op.weight.dtype == DType::kFloat32 ? gather<float>(op) : gather<bfloat16>(op); }

}  // namespace specengine::SPECENGINE_ISA
