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
    case 1: return tile<1, Weight>(args...);
    case 2: return tile<2, Weight>(args...);
    case 3: return tile<3, Weight>(args...);
    case 4: return tile<4, Weight>(args...);
    case 5: return tile<5, Weight>(args...);
    case 6: return tile<6, Weight>(args...);
    default: __builtin_unreachable();
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

float from_half(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(mantissa), -24);
  const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | (mantissa << 13);
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

float element(const TensorView& t, int64_t i) {
  switch (t.dtype) {
    case DType::kFloat32: return t.as<float>()[i];
    case DType::kBFloat16: return load1(t.as<bfloat16>() + i);
    default: return from_half(t.as<uint16_t>()[i]);
  }
}

template <typename Weight>
void pack(const PackLinear& op) {
  const int64_t R = op.rows.shape[0], C = op.rows.shape[1];
  parallel_for(R, [&](int64_t r) {
    const int64_t row = op.first + r;
    Weight* column = op.packed.as<Weight>() + row / kPanel * C * kPanel + row % kPanel;
    for (int64_t c = 0; c < C; ++c) store1(column + c * kPanel, element(op.rows, r * C + c));
  });
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

void run(const PackLinear& op) {
  op.packed.dtype == DType::kFloat32 ? pack<float>(op) : pack<bfloat16>(op);
}
void run(const Linear& op) {
  op.weight.dtype == DType::kFloat32 ? linear<float>(op) : linear<bfloat16>(op);
}
void run(const GatherRows& op) {
  op.weight.dtype == DType::kFloat32 ? gather<float>(op) : gather<bfloat16>(op);
}

}  // namespace specengine::SPECENGINE_ISA
