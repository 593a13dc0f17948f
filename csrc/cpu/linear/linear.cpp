// Skinny GEMM. One task owns a few panels (16 output columns each) for all rows; a tile of rows keeps its sums in
// registers and walks C once (linear/kernels.h).
#include "ops/linear.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "cpu/linear/kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/simd.h"
#include "ops/experts/experts.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// A kernel's function for tiles of 1 to `rows` rows. The loop over panels calls them by pointer, so that it is compiled
// once.
struct Tiles {
  int64_t rows;
  void (*const* run)(const uint8_t* rows, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]);
};
constexpr int64_t kMostTileRows = std::max(kFloatRows, kCodedRows);

template <typename Kernel>
Tiles tiles_of() {
  return []<int... R>(std::integer_sequence<int, R...>) {
    static constexpr std::remove_const_t<std::remove_pointer_t<decltype(Tiles::run)>> kRuns[] = {
        &Kernel::template run<R + 1>...};
    return Tiles{sizeof...(R), kRuns};
  }(std::make_integer_sequence<int, Kernel::kRows>());
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

void multiply(const Tiles& tiles, const TensorView& x, const TensorView& weight, const RowGroups& groups,
              const Sink& sink) {
  const int64_t row_size = x.shape[1], row_bytes = row_size * (x.dtype == DType::kUInt8 ? kRowBlockBytes : 4);
  const int64_t panel_bytes = weight.shape[1] * weight.shape[2] * bytes_of(weight.dtype);
  // Rows of a block stay in the second-level cache while the task's panels pass by.
  constexpr int64_t kCacheBytes = 192 << 10;
  const int64_t block_rows = std::max(tiles.rows, kCacheBytes / std::max<int64_t>(1, row_bytes));
  const auto multiply_panels = [&](const RowGroup& group, int64_t first_panel, int64_t last_panel) {
    const int64_t last_row = group.first_row + group.rows;
    for (int64_t first = group.first_row; first < last_row; first += block_rows) {
      const int64_t rows = std::min(block_rows, last_row - first), count = (rows + tiles.rows - 1) / tiles.rows;
      for (int64_t p = first_panel; p < last_panel; ++p) {
        for (int64_t t = 0; t < count; ++t) {  // of nearly equal height
          const int64_t begin = first + rows * t / count, end = first + rows * (t + 1) / count;
          if (!sink.reads(begin, end, p * kPanel)) continue;
          float result[kMostTileRows][kPanel];
          tiles.run[end - begin - 1](x.as<uint8_t>() + begin * row_bytes, row_size,
                                     weight.as<uint8_t>() + (group.first_panel + p) * panel_bytes, result);
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

template <typename Codes>
Tiles tiles_of_codes(bool quantised_rows) {
  return quantised_rows ? tiles_of<CodedKernel<Codes>>() : tiles_of<DecodingKernel<Codes>>();
}

Tiles tiles_for(const TensorView& x, const TensorView& weight) {
  const bool codes = x.dtype == DType::kUInt8;
  if (weight.dtype == DType::kBFloat16) return tiles_of<FloatKernel<bfloat16>>();
  if (weight.dtype == DType::kFloat16) return tiles_of<FloatKernel<half>>();
  if (weight.dtype == DType::kFloat32) return tiles_of<FloatKernel<float>>();
  const BlockFormat* format = &format_of(weight);
  if (format == &kQ8) return tiles_of_codes<Codes8<kQ8>>(codes);
  if (format == &kQ4) return tiles_of_codes<Codes4<kQ4>>(codes);
  if (format == &kQ4Min) return tiles_of_codes<Codes4<kQ4Min>>(codes);
  if (format == &kInt4By32) return tiles_of_codes<Codes4<kInt4By32>>(codes);
  if (format == &kInt4By128) return tiles_of_codes<Codes4<kInt4By128>>(codes);
  if (format == &kInt8By32) return tiles_of_codes<Codes8<kInt8By32>>(codes);
  if (format == &kInt8By128) return tiles_of_codes<Codes8<kInt8By128>>(codes);
  if (format == &kInt4Min16) return tiles_of_codes<Codes4<kInt4Min16>>(codes);
  if (format == &kTable4By16) return tiles_of_codes<TableCodes<kTable4By16>>(codes);
  if (format == &kTable4By32) return tiles_of_codes<TableCodes<kTable4By32>>(codes);
  return tiles_of<E4m3Kernel>();
}

void multiply_any(const TensorView& x, const TensorView& weight, const RowGroups& groups, const Sink& sink) {
  multiply(tiles_for(x, weight), x, weight, groups, sink);
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
  if (op.masks.defined()) {
    parallel_for(op.x.shape[0], [&](int64_t m) {
      std::memset(op.out.as<float>() + m * op.out.shape[1] + op.first, 0, op.rows * sizeof(float));
    });
  }
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
