// Skinny GEMM. One task owns a few panels (16 output columns each) for all rows; a tile of rows keeps its sums in
// registers and walks C once. Every sum is one chain of fused multiply-adds in the order of C, for any number of rows,
// so a row's result never depends on the rows beside it. For codes the chain is over the groups of columns that share a
// scale, at most 32, whose integer sums are exact; for e4m3 it is over blocks of 128 columns, whose sums are such
// chains.
#include "ops/linear.h"

#include <atomic>
#include <vector>

#include "cpu/dot_codes.h"
#include "cpu/parallel_for.h"
#include "cpu/simd.h"
#include "ops/experts.h"

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

inline int32_t sum_of(const int8_t* codes, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += codes[i];
  return sum;
}

template <typename Codes>
struct CodedKernel {
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
    constexpr const BlockFormat& kFormat = Codes::kFormat;
    constexpr int kParts = static_cast<int>(kFormat.parts()), kGroups = kFormat.group < kBlock ? 2 : 1;  // of a part
    constexpr int64_t kPartBytes = kFormat.bytes() / kParts;
    // Slice by slice: the sums of one leave registers for more rows, and the panel is near when it is walked again.
    for (int slice = 0; slice < kSlices; ++slice) {
      Vector sum[R] = {};
      for (int64_t b = 0; b < row_size; ++b) {
        const uint8_t* block = panel + b / kParts * kFormat.bytes();
        const int part = static_cast<int>(b % kParts);
        if (slice == 0) {
          for (int64_t line = 0; line < kPartBytes; line += 64) {
            __builtin_prefetch(panel + b * kPartBytes + kAhead + line);
          }
        }
        for (int group = 0; group < kGroups; ++group) {
          constexpr int kSteps = kBlock / 4 / kGroups;
          typename Codes::Sum dot[R] = {};
#pragma GCC unroll 8
          for (int step = group * kSteps; step < (group + 1) * kSteps; ++step) {
            const auto codes = Codes::load(block, part, step, slice);
            for (int r = 0; r < R; ++r) {
              Codes::add(dot[r], codes, x[b + r * row_size].code + 4 * step);
              settle(dot[r]);
            }
          }
          const int64_t place = part * kBlock / kFormat.group + group;
          const Vector scale = Codes::scale(block, place, slice);
          int32_t code_sum[R];
          for (int r = 0; r < R; ++r) {
            const RowBlock& row = x[b + r * row_size];
            code_sum[r] = kGroups == 1 ? row.code_sum : sum_of(row.code + 4 * kSteps * group, 4 * kSteps);
            const Vector exact = Codes::total(dot[r], code_sum[r]);
            sum[r] = fmadd(exact, scale * splat_of<Vector>(row.scale), sum[r]);
          }
          if constexpr (Codes::kHasMinimum) {
            const Vector minimum = Codes::minimum(block, place, slice, scale);
            for (int r = 0; r < R; ++r) {
              const RowBlock& row = x[b + r * row_size];
              const float x_sum = kGroups == 1 ? row.sum : row.scale * static_cast<float>(code_sum[r]);
              sum[r] = fmadd(minimum, splat_of<Vector>(x_sum), sum[r]);
            }
          }
        }
      }
      for (int r = 0; r < R; ++r) store(out[r] + slice * kLanesPerSlice, sum[r]);
    }
  }
};

// The same codes multiply rows of floats: each becomes the float of BlockColumn::value, so a row has the bits that a
// float32 weight of these values gives it.
template <typename Codes>
struct DecodingKernel {
  static constexpr int kRows = FloatKernel<float>::kRows;
  using Row = float;

  static int64_t row_size(const TensorView& x) { return x.shape[1]; }
  static int64_t panel_size(const TensorView& weight) { return weight.shape[1] * weight.shape[2]; }

  template <int R>
  static void run(const Row* x, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    constexpr const BlockFormat& kFormat = Codes::kFormat;
    for (int slice = 0; slice < kSlices; ++slice) {
      Vector sum[R] = {};
      for (int64_t c = 0; c < row_size; c += 4) {
        const uint8_t* block = panel + c / kFormat.columns * kFormat.bytes();
        const int64_t column = c % kFormat.columns, group = column / kFormat.group;
        const auto four =
            Codes::numbers(block, static_cast<int>(column / kBlock), static_cast<int>(column % kBlock / 4), slice);
        const Vector scale = Codes::scale(block, group, slice);
        for (int64_t k = 0; k < std::min<int64_t>(4, row_size - c); ++k) {
          const Vector w = Codes::value(four.of[k], block, group, slice, scale);
          for (int r = 0; r < R; ++r) sum[r] = fmadd(splat_of<Vector>(x[r * row_size + c + k]), w, sum[r]);
        }
      }
      for (int r = 0; r < R; ++r) store(out[r] + slice * kLanesPerSlice, sum[r]);
    }
  }
};

// Sixteen floats of e4m3, each 2^-8 of its value: their bits are those of a half with another exponent.
inline f32x16 load_small_e4m3(const uint8_t* p) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xFFFF, halves);
#else
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
#else
  half halves[kPanel];
  for (int i = 0; i < kPanel; ++i) halves[i].bits = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7);
  return load16(halves);
#endif
}

struct E4m3Kernel {
  static constexpr int kRows = FloatKernel<float>::kRows;
  using Row = float;

  static int64_t row_size(const TensorView& x) { return x.shape[1]; }
  static int64_t panel_size(const TensorView& weight) { return weight.shape[1] * weight.shape[2]; }

  template <int R>
  static void run(const Row* x, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    for (int r = 0; r < R; ++r) store16(out[r], f32x16{});
    for (int64_t first = 0; first < row_size; first += kE4m3.columns, panel += kE4m3.bytes()) {
      f32x16 sum[R] = {};
      const int64_t columns = std::min(kE4m3.columns, row_size - first);
      for (int64_t c = 0; c < columns; ++c) {
        __builtin_prefetch(panel + c * kPanel + kAhead);
        const f32x16 w = load_small_e4m3(panel + c * kPanel);
        for (int r = 0; r < R; ++r) sum[r] = fmadd(splat16(x[r * row_size + first + c]), w, sum[r]);
      }
      const auto* scales = reinterpret_cast<const float*>(panel + kE4m3.scales_at());
      const f32x16 scale = fmadd(load16(scales), splat16(256.0f), f32x16{});
      for (int r = 0; r < R; ++r) store16(out[r], fmadd(sum[r], scale, load16(out[r])));
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

template <typename Op>
const OptionalTensor& masks_of(const Op& op) {
  static const OptionalTensor none{};
  if constexpr (requires { op.masks; }) return op.masks;
  return none;
}

struct Sink {
  template <typename Op>
  explicit Sink(const Op& op)
      : op(&op),
        call([](const void* op, int64_t row, int64_t column, float* result) {
          take(*static_cast<const Op*>(op), row, column, result);
        }),
        masks(masks_of(op)) {}

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

// Rows of x that multiply the same panels of a weight.
struct RowGroup {
  int64_t first_row, rows, first_panel;
};

// Groups of equally many panels: the experts that a pass reads, or one group of all rows and panels.
struct RowGroups {
  const RowGroup* groups;
  int64_t count, panels;
};

template <typename Kernel>
void multiply(const TensorView& x, const TensorView& weight, const RowGroups& groups, const Sink& sink) {
  const int64_t row_size = Kernel::row_size(x), panel_size = Kernel::panel_size(weight);
  // Rows of a block stay in the second-level cache while the task's panels pass by.
  constexpr int64_t kCacheBytes = 192 << 10;
  const int64_t row_bytes = row_size * static_cast<int64_t>(sizeof(typename Kernel::Row));
  const int64_t block_rows = std::max<int64_t>(Kernel::kRows, kCacheBytes / std::max<int64_t>(1, row_bytes));
  const auto multiply_panels = [&](const RowGroup& group, int64_t first_panel, int64_t last_panel) {
    const int64_t last_row = group.first_row + group.rows;
    for (int64_t first = group.first_row; first < last_row; first += block_rows) {
      const int64_t rows = std::min(block_rows, last_row - first), tiles = (rows + Kernel::kRows - 1) / Kernel::kRows;
      for (int64_t p = first_panel; p < last_panel; ++p) {
        for (int64_t t = 0; t < tiles; ++t) {  // of nearly equal height
          const int64_t begin = first + rows * t / tiles, end = first + rows * (t + 1) / tiles;
          if (!sink.reads(begin, end, p * kPanel)) continue;
          float result[Kernel::kRows][kPanel];
          run_tile<Kernel>(end - begin, x.as<typename Kernel::Row>() + begin * row_size, row_size,
                           weight.as<uint8_t>() + (group.first_panel + p) * panel_size, result);
          for (int64_t m = begin; m < end; ++m) sink.call(sink.op, m, p * kPanel, result[m - begin]);
        }
      }
    }
  };
  // About eight pieces per thread: enough to even out a disturbed core, few enough to keep the counter cold.
  const int64_t panels = groups.count * groups.panels;
  const int64_t per_task = std::max<int64_t>(1, panels / (8 * num_threads()));
  parallel_for((panels + per_task - 1) / per_task, [&](int64_t task) {
    const int64_t end = std::min(panels, (task + 1) * per_task);
    for (int64_t at = task * per_task; at < end;) {
      const int64_t group = at / groups.panels, stop = std::min(end, (group + 1) * groups.panels);
      multiply_panels(groups.groups[group], at - group * groups.panels, stop - group * groups.panels);
      at = stop;
    }
  });
}

template <template <typename> class Kernel>
void multiply_codes(const TensorView& x, const TensorView& weight, const RowGroups& groups, const Sink& sink) {
  const BlockFormat* format = &format_of(weight);
  if (format == &kQ8) return multiply<Kernel<Codes8<kQ8>>>(x, weight, groups, sink);
  if (format == &kQ4) return multiply<Kernel<Codes4<kQ4>>>(x, weight, groups, sink);
  if (format == &kQ4Min) return multiply<Kernel<Codes4<kQ4Min>>>(x, weight, groups, sink);
  if (format == &kInt4By32) return multiply<Kernel<Codes4<kInt4By32>>>(x, weight, groups, sink);
  if (format == &kInt4By128) return multiply<Kernel<Codes4<kInt4By128>>>(x, weight, groups, sink);
  if (format == &kInt8By32) return multiply<Kernel<Codes8<kInt8By32>>>(x, weight, groups, sink);
  if (format == &kInt8By128) return multiply<Kernel<Codes8<kInt8By128>>>(x, weight, groups, sink);
  if (format == &kInt4Min16) return multiply<Kernel<Codes4<kInt4Min16>>>(x, weight, groups, sink);
  if (format == &kTable4By16) return multiply<Kernel<TableCodes<kTable4By16>>>(x, weight, groups, sink);
  multiply<Kernel<TableCodes<kTable4By32>>>(x, weight, groups, sink);
}

void multiply_any(const TensorView& x, const TensorView& weight, const RowGroups& groups, const Sink& sink) {
  if (weight.dtype != DType::kUInt8) {
    with_float_type(weight.dtype, [&](auto zero) { multiply<FloatKernel<decltype(zero)>>(x, weight, groups, sink); });
    return;
  }
  if (&format_of(weight) == &kE4m3) return multiply<E4m3Kernel>(x, weight, groups, sink);
  x.dtype == DType::kFloat32 ? multiply_codes<DecodingKernel>(x, weight, groups, sink)
                             : multiply_codes<CodedKernel>(x, weight, groups, sink);
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

template <>
void take(const ExpertLinear& op, int64_t row, int64_t column, float* result) {
  const int64_t N = op.out.shape[1], columns = std::min(kPanel, op.columns - column);
  if (op.bias.defined()) {
    const int32_t* starts = op.starts.as<int32_t>();
    const int64_t expert = std::upper_bound(starts, starts + op.starts.shape[0], row) - starts - 1;
    add_bias(op.bias, expert * N + op.first + column, columns, result);
  }
  std::memcpy(op.out.as<float>() + row * N + op.first + column, result, columns * sizeof(float));
}

// The rows of x in the order of the places, in a buffer of the thread that the first call allocates.
TensorView gathered(const ExpertLinear& op) {
  if (!op.rows.defined()) return op.x;
  thread_local std::vector<uint8_t> buffer;
  const int64_t places = op.rows.shape[0];
  const int64_t row_bytes = op.x.dtype == DType::kUInt8 ? op.x.shape[1] * kRowBlockBytes
                                                        : op.x.shape[1] * static_cast<int64_t>(sizeof(float));
  buffer.resize(std::max<size_t>(buffer.size(), places * row_bytes));
  uint8_t* const to = buffer.data();  // the workers' thread_local is another one
  parallel_for(places, [&](int64_t p) {
    std::memcpy(to + p * row_bytes, op.x.as<uint8_t>() + op.rows.as<int32_t>()[p] * row_bytes, row_bytes);
  });
  TensorView x = op.x;
  x.data = to, x.shape[0] = places;
  return x;
}

}  // namespace

void run(const ExpertLinear& op) {
  op.check_values();
  const int32_t* starts = op.starts.as<int32_t>();
  const int64_t experts = op.starts.shape[0] - 1;
  thread_local std::vector<RowGroup> groups;
  groups.clear();
  for (int64_t e = 0; e < experts; ++e) {
    if (starts[e + 1] > starts[e]) groups.push_back({starts[e], starts[e + 1] - starts[e], e * op.panels()});
  }
  multiply_any(gathered(op), op.weight, {groups.data(), static_cast<int64_t>(groups.size()), op.panels()}, Sink(op));
}

void run(const Linear& op) {
  const RowGroup whole{0, op.x.shape[0], 0};
  multiply_any(op.x, op.weight, {&whole, 1, op.weight.shape[0]}, Sink(op));
}

void run(const LinearArgmax& op) {
  const int64_t M = op.x.shape[0];
  int64_t* keys = op.keys.as<int64_t>();
  std::fill(keys, keys + M, kLeastKey);
  const RowGroup whole{0, M, 0};
  multiply_any(op.x, op.weight, {&whole, 1, op.weight.shape[0]}, Sink(op));
  for (int64_t m = 0; m < M; ++m) op.ids.as<int32_t>()[m] = argmax_of(keys[m]);
}

}  // namespace specengine::SPECENGINE_ISA
