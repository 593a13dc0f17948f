// Weights into their packed form: floats are quantised here, codes and scales of files stay. One task owns one panel.
#include "ops/packed_weight.h"

#include "cpu/block_column.h"
#include "cpu/parallel_for.h"
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// Calls body(panel, begin, end) for every panel: the op has rows [begin, end) of the weight for it.
template <typename Body>
void for_panels(int64_t first, int64_t rows, const Body& body) {
  if (rows == 0) return;
  const int64_t first_panel = first / kPanel, last_panel = (first + rows - 1) / kPanel;
  parallel_for(last_panel - first_panel + 1, [&](int64_t task) {
    const int64_t panel = first_panel + task;
    body(panel, std::max(first, panel * kPanel), std::min(first + rows, (panel + 1) * kPanel));
  });
}

int nearest(float x, int low, int high) {
  return static_cast<int>(std::nearbyint(std::min(std::max(x, static_cast<float>(low)), static_cast<float>(high))));
}

// The codes are chosen for the scale as float16 keeps it.
void quantise(const float* x, const BlockColumn& out) {
  float low = 0, high = 0;
  float poison = 0;  // NaN where an entry is not finite
  for (int64_t c = 0; c < kBlock; ++c) {
    low = std::min(low, x[c]), high = std::max(high, x[c]), poison += x[c] * 0.0f;
  }
  const bool four = out.format.bits == 4;
  out.set_scale(0, poison + (four ? (high - low) / 15.0f : std::max(high, -low) / 127.0f));
  if (four) out.set_minimum(0, low);
  const float scale = out.scale(0), offset = four ? out.minimum(0) : 0.0f;
  if (!std::isfinite(scale) || !std::isfinite(offset)) {
    out.set_scale(0, NAN);
    for (int64_t c = 0; c < kBlock; ++c) out.set_code(c, 0);
    return;
  }
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int64_t c = 0; c < kBlock; ++c) {
    out.set_code(c, nearest((x[c] - offset) * inverse, four ? 0 : -127, four ? 15 : 127));
  }
}

template <typename Row>
void pack_quantised(const PackLinear& op) {
  const int64_t C = op.rows.shape[1], blocks = op.packed.shape[1];
  for_panels(op.first, op.rows.shape[0], [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Row* x = op.rows.as<Row>() + (row - op.first) * C;
      for (int64_t b = 0; b < blocks; ++b) {
        float values[kBlock] = {};
        for (int64_t c = 0; c < std::min(kBlock, C - b * kBlock); ++c) values[c] = load1(x + b * kBlock + c);
        quantise(values, block_column(op.packed, row, b));
      }
    }
  });
}

template <typename Row, typename Weight>
void pack(const PackLinear& op) {
  const int64_t C = op.rows.shape[1];
  // The rows of a panel are read side by side, so every cache line of the panel is written once.
  for_panels(op.first, op.rows.shape[0], [&](int64_t panel, int64_t begin, int64_t end) {
    Weight* out = op.packed.as<Weight>() + panel * C * kPanel + begin % kPanel;
    const Row* rows = op.rows.as<Row>() + (begin - op.first) * C;
    for (int64_t c = 0; c < C; ++c) {
      for (int64_t n = 0; n < end - begin; ++n) store1(out + c * kPanel + n, load1(rows + n * C + c));
    }
  });
}

// Codes [0, 32) of a 4-bit block of the file: byte i holds code i in its low half, code i + 16 in its high half.
void copy_codes4(const uint8_t* from, const BlockColumn& out) {
  for (int64_t c = 0; c < kBlock; ++c) out.set_code(c, from[c % 16] >> (c < 16 ? 0 : 4) & 15);
}

// One block of the file, 32 columns (256 of Q4_K), into a column of its packed blocks.
void repack(const std::string& type, const uint8_t* from, const TensorView& packed, int64_t row, int64_t b) {
  const half* halves = reinterpret_cast<const half*>(from);
  if (type == "Q8_0") {
    const BlockColumn out = block_column(packed, row, b);
    out.set_scale(0, load1(halves));
    for (int64_t c = 0; c < kBlock; ++c) out.set_code(c, from[2 + c]);
  } else if (type == "Q4_0") {
    const BlockColumn out = block_column(packed, row, b);
    out.set_scale(0, load1(halves));
    copy_codes4(from + 2, out);
  } else if (type == "Q4_1") {
    const BlockColumn out = block_column(packed, row, b);
    out.set_scale(0, load1(halves)), out.set_minimum(0, load1(halves + 1));
    copy_codes4(from + 4, out);
  } else {  // Q4_K: eight blocks; 6-bit scales s and minima m of each: weight = d * s * code - dmin * m
    const float d = load1(halves), dmin = load1(halves + 1);
    const uint8_t* small = from + 4;
    for (int64_t i = 0; i < 8; ++i) {
      const BlockColumn out = block_column(packed, row, 8 * b + i);
      const int s = i < 4 ? small[i] & 63 : (small[i + 4] & 15) | small[i - 4] >> 6 << 4;
      const int m = i < 4 ? small[i + 4] & 63 : small[i + 4] >> 4 | small[i] >> 6 << 4;
      out.set_scale(0, d * static_cast<float>(s)), out.set_minimum(0, -dmin * static_cast<float>(m));
      const uint8_t* codes = from + 16 + i / 2 * 32;  // two blocks share 32 bytes: low halves, high halves
      for (int64_t c = 0; c < kBlock; ++c) out.set_code(c, codes[c] >> (i % 2 ? 4 : 0) & 15);
    }
  }
}

// Row `row` of the op's tensors into one block of the packed weight.
void pack_block(const PackCoded& op, int64_t row, int64_t b) {
  const BlockColumn out = block_column(op.packed, op.first + row, b);
  const BlockFormat& format = out.format;
  const int64_t C = op.codes.shape[1], G = op.scales.shape[1], begin = b * format.columns;
  const int shift = format.zeros && format.bits == 8 ? 128 : 0;  // signed in the block
  for (int64_t group = 0; group < format.groups(); ++group) {
    const int64_t first_column = begin + group * format.group;
    if (first_column >= C) break;
    const int64_t from = row * G + first_column / op.group;
    out.set_scale(group, op.scales.as<float>()[from]);
    if (format.minima) out.set_minimum(group, op.minima.as<float>()[from]);
    if (format.zeros) out.set_zero(group, op.zeros.as<uint8_t>()[from] - shift);
  }
  const uint8_t* codes = op.codes.as<uint8_t>() + row * C + begin;
  const int most = format.bits == 8 ? 255 : 15;
  for (int64_t c = 0; c < std::min(format.columns, C - begin); ++c) {
    out.set_code(c, (codes[c] & most) - shift);
    if (format.e4m3 && (codes[c] & 0x7F) == 0x7F) out.set_scale(0, NAN);  // the kernels read this NaN as a number
  }
  if (format.table) out.set_table(op.table.as<uint8_t>());
}

}  // namespace

void run(const PackCoded& op) {
  for_panels(op.first, op.codes.shape[0], [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t b = 0; b < op.packed.shape[1]; ++b) pack_block(op, row - op.first, b);
    }
  });
}

void run(const PackLinear& op) {
  with_float_type(op.rows.dtype, [&](auto row) {
    using Row = decltype(row);
    if (op.packed.dtype == DType::kUInt8) return pack_quantised<Row>(op);
    with_float_type(op.packed.dtype, [&](auto weight) { pack<Row, decltype(weight)>(op); });
  });
}

void run(const PackBlocks& op) {
  const PackBlocks::Layout& from = op.layout();
  const int64_t row_bytes = op.rows.shape[1], blocks = row_bytes / from.bytes;
  for_panels(op.first, op.rows.shape[0], [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* bytes = op.rows.as<uint8_t>() + (row - op.first) * row_bytes;
      for (int64_t b = 0; b < blocks; ++b) repack(op.type, bytes + b * from.bytes, op.packed, row, b);
    }
  });
}

}  // namespace specengine::SPECENGINE_ISA
