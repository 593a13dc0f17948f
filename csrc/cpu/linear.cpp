// Skinny GEMM. One task owns a few panels (16 output columns each) for all rows; a tile of rows keeps its sums in
// registers and walks C once. Every sum is one chain of fused multiply-adds in the order of C, for any number of rows,
// so a row's result never depends on the rows beside it. For a quantised weight the chain is over blocks of 32 columns,
// whose integer sums are exact.
#include "ops/linear.h"

#include <atomic>

#include "cpu/dot_codes.h"
#include "cpu/parallel_for.h"
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// Bytes by which the prefetch runs ahead of the multiplication. The hardware's own prefetch runs dry when several rows
// share a weight: without this, 8 rows cost 1.5 times as much.
constexpr int64_t kAhead = 6144;

// A kernel multiplies up to kRows rows by one panel; `Row` is its step along a row of x.

template <typename Weight>
struct FloatKernel {
#if defined(__AVX512F__)
  static constexpr int kRows = 12;
#else
  static constexpr int kRows = 6;  // 12 sums, 2 weights, 1 broadcast: all 16 vector registers of AVX2
#endif
  using Row = float;

  static int64_t row_size(const TensorView& x) { return x.shape[1]; }
  static int64_t panel_size(const TensorView& weight) { return weight.shape[1] * kPanel * sizeof(Weight); }

  template <int R>
  static void run(const Row* x, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    const Weight* weight = reinterpret_cast<const Weight*>(panel);
    f32x16 sum[R] = {};
    for (int64_t c = 0; c < row_size; ++c) {
      __builtin_prefetch(weight + c * kPanel + kAhead / sizeof(Weight));
      const f32x16 w = load16(weight + c * kPanel);
      for (int r = 0; r < R; ++r) sum[r] = fmadd(splat16(x[r * row_size + c]), w, sum[r]);
    }
    for (int r = 0; r < R; ++r) store16(out[r], sum[r]);
  }
};

template <typename Codes>
struct QuantisedKernel {
#if defined(__AVX512VNNI__)
  static constexpr int kRows = 12;
#else
  static constexpr int kRows = 6;  // sums and as many dot products; AVX-512 without VNNI gains nothing by more
#endif
  using Row = RowBlock;

  static int64_t row_size(const TensorView& x) { return x.shape[1]; }
  static int64_t panel_size(const TensorView& weight) { return weight.shape[1] * weight.shape[2]; }

  template <int R>
  static void run(const Row* x, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    // Slice by slice: the sums of one leave registers for more rows, and the panel is near when it is walked again.
    for (int slice = 0; slice < kSlices; ++slice) {
      Vector sum[R] = {};
      const uint8_t* codes_of_block = panel;
      for (int64_t b = 0; b < row_size; ++b, codes_of_block += Codes::kBytes) {
        if (slice == 0) {
          for (int64_t line = 0; line < Codes::kBytes; line += 64) __builtin_prefetch(codes_of_block + kAhead + line);
        }
        const RowBlock* block = x + b;
        typename Codes::Sum dot[R] = {};
#pragma GCC unroll 8
        for (int group = 0; group < kBlock / 4; ++group) {
          const auto codes = Codes::load(codes_of_block, group, slice);
          for (int r = 0; r < R; ++r) {
            Codes::add(dot[r], codes, block[r * row_size].code + 4 * group);
            settle(dot[r]);
          }
        }
        const half* scales = Codes::scales(codes_of_block) + slice * kLanesPerSlice;
        const Vector scale = load<Vector>(scales);
        for (int r = 0; r < R; ++r) {
          const RowBlock& row = block[r * row_size];
          const Vector exact = Codes::total(dot[r], row.code_sum);
          sum[r] = fmadd(exact, scale * splat_of<Vector>(row.scale), sum[r]);
        }
        if constexpr (Codes::kHasMinimum) {
          const Vector minimum = load<Vector>(scales + kPanel);
          for (int r = 0; r < R; ++r) {
            sum[r] = fmadd(minimum, splat_of<Vector>(block[r * row_size].sum), sum[r]);
          }
        }
      }
      for (int r = 0; r < R; ++r) store(out[r] + slice * kLanesPerSlice, sum[r]);
    }
  }
};

template <typename Kernel, int R = Kernel::kRows>
void run_tile(int64_t rows, const typename Kernel::Row* x, int64_t row_size, const uint8_t* panel,
              float (*out)[kPanel]) {
  if (rows == R) return Kernel::template run<R>(x, row_size, panel, out);
  if constexpr (R > 1) run_tile<Kernel, R - 1>(rows, x, row_size, panel, out);
}

// A bit for each of the 16 columns of a panel that the row's mask allows.
uint32_t allowed_columns(const OptionalTensor& masks, int64_t row, int64_t column) {
  static_assert(kMaskBits % kPanel == 0);
  constexpr uint32_t kAll = (1u << kPanel) - 1;
  if (!masks.defined()) return kAll;
  return masks.as<uint32_t>()[row * masks.shape[1] + column / kMaskBits] >> (column % kMaskBits) & kAll;
}

// Takes the 16 results of a row and panel, without bias. A function pointer and no template parameter, so that the
// kernels are compiled once.
template <typename Op>
void take(const Op& op, int64_t row, int64_t column, float* result);

struct Sink {
  template <typename Op>
  explicit Sink(const Op& op)
      : op(&op),
        call([](const void* op, int64_t row, int64_t column, float* result) {
          take(*static_cast<const Op*>(op), row, column, result);
        }),
        masks(op.masks) {}

  // Whether any row from `begin` to `end` allows a column of the panel. JSON allows few tokens at most places, so many
  // panels are never multiplied.
  bool reads(int64_t begin, int64_t end, int64_t column) const {
    if (!masks.defined()) return true;
    uint32_t allowed = 0;
    for (int64_t row = begin; row < end; ++row) allowed |= allowed_columns(masks, row, column);
    return allowed != 0;
  }

  const void* op;
  void (*call)(const void*, int64_t, int64_t, float*);
  const OptionalTensor& masks;
};

template <typename Kernel>
void multiply(const TensorView& x, const TensorView& weight, const Sink& sink) {
  const int64_t M = x.shape[0], panels = weight.shape[0];
  const int64_t row_size = Kernel::row_size(x), panel_size = Kernel::panel_size(weight);
  // Rows of a block stay in the second-level cache while the task's panels pass by.
  constexpr int64_t kCacheBytes = 192 << 10;
  const int64_t row_bytes = row_size * static_cast<int64_t>(sizeof(typename Kernel::Row));
  const int64_t block_rows = std::max<int64_t>(Kernel::kRows, kCacheBytes / std::max<int64_t>(1, row_bytes));
  // About eight pieces per thread: enough to even out a disturbed core, few enough to keep the counter cold.
  const int64_t per_task = std::max<int64_t>(1, panels / (8 * num_threads()));
  parallel_for((panels + per_task - 1) / per_task, [&](int64_t task) {
    for (int64_t first = 0; first < M; first += block_rows) {
      const int64_t rows = std::min(block_rows, M - first), tiles = (rows + Kernel::kRows - 1) / Kernel::kRows;
      for (int64_t p = task * per_task; p < std::min(panels, (task + 1) * per_task); ++p) {
        for (int64_t t = 0; t < tiles; ++t) {  // of nearly equal height
          const int64_t begin = first + rows * t / tiles, end = first + rows * (t + 1) / tiles;
          if (!sink.reads(begin, end, p * kPanel)) continue;
          float result[Kernel::kRows][kPanel];
          run_tile<Kernel>(end - begin, x.as<typename Kernel::Row>() + begin * row_size, row_size,
                           weight.as<uint8_t>() + p * panel_size, result);
          for (int64_t m = begin; m < end; ++m) sink.call(sink.op, m, p * kPanel, result[m - begin]);
        }
      }
    }
  });
}

void multiply_any(const TensorView& x, const TensorView& weight, const Sink& sink) {
  if (weight.dtype != DType::kUInt8) {
    with_float_type(weight.dtype, [&](auto zero) { multiply<FloatKernel<decltype(zero)>>(x, weight, sink); });
    return;
  }
  if (weight.shape[2] == kQ8Bytes) return multiply<QuantisedKernel<Codes8>>(x, weight, sink);
  if (weight.shape[2] == kQ4Bytes) return multiply<QuantisedKernel<Codes4<false>>>(x, weight, sink);
  multiply<QuantisedKernel<Codes4<true>>>(x, weight, sink);
}

// Adds the bias of 16 columns, of which `columns` exist.
void add_bias(const TensorView& bias, int64_t first, int64_t columns, float* result) {
  if (!bias.defined()) return;
  for (int64_t i = 0; i < columns; ++i) result[i] += bias.as<float>()[first + i];
}

// Whether one of 16 results may have a larger key. Most panels have none and end here.
bool may_exceed(const float* result, int64_t key) {
  int32_t bits = static_cast<int32_t>(key >> 32);
  bits = bits < 0 ? bits ^ INT32_MAX : bits;
  float top;
  std::memcpy(&top, &bits, sizeof(top));
  const i32x8 smaller = (load8(result) < splat(top)) & (load8(result + kLanes) < splat(top));
  int32_t all = -1;
  for (int i = 0; i < kLanes; ++i) all &= smaller[i];
  return all == 0;
}

template <>
void take(const Linear& op, int64_t row, int64_t column, float* result) {
  const int64_t columns = std::min(kPanel, op.rows - column);
  add_bias(op.bias, op.first + column, columns, result);
  std::memcpy(op.out.as<float>() + row * op.out.shape[1] + op.first + column, result, columns * sizeof(float));
}

template <>
void take(const LinearArgmax& op, int64_t row, int64_t column, float* result) {
  const uint32_t allowed = allowed_columns(op.masks, row, column);
  const int64_t columns = std::min(kPanel, op.rows - column);
  add_bias(op.bias, column, columns, result);
  std::atomic_ref<int64_t> key(op.keys.as<int64_t>()[row]);
  int64_t seen = key.load(std::memory_order_relaxed);
  if (!may_exceed(result, seen)) return;
  int64_t best = kLeastKey;
  for (int64_t i = 0; i < columns; ++i) {
    if (allowed >> i & 1) best = std::max(best, argmax_key(result[i], column + i));
  }
  // A maximum does not depend on the order of the panels.
  while (best > seen && !key.compare_exchange_weak(seen, best, std::memory_order_relaxed)) {
  }
}

}  // namespace

void run(const Linear& op) { multiply_any(op.x, op.weight, Sink(op)); }

void run(const LinearArgmax& op) {
  const int64_t M = op.x.shape[0];
  int64_t* keys = op.keys.as<int64_t>();
  std::fill(keys, keys + M, kLeastKey);
  multiply_any(op.x, op.weight, Sink(op));
  for (int64_t m = 0; m < M; ++m) op.ids.as<int32_t>()[m] = argmax_of(keys[m]);
}

}  // namespace specengine::SPECENGINE_ISA
