// Weights into their packed form: floats are quantised here, codes and scales of files stay. One task owns one panel.
#include "ops/packed_weight.h"

#include "cpu/block_column.h"
#include "cpu/file_blocks.h"
#include "cpu/parallel_for.h"
#include "cpu/simd.h"
#include "ops/file_blocks.h"

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

BlockColumn column_at(const TensorView& packed, const BlockFormat& format, int64_t row, int64_t b) {
  return {packed.as<uint8_t>() + (row / kPanel * packed.shape[1] + b) * format.bytes(), format, row % kPanel};
}

// Writes the codes of a part of 32 columns, or of 16 bytes with two 4-bit codes each: four columns are one word.
template <int bytes>
void set_words(const uint8_t* codes, const BlockColumn& out, int64_t part = 0) {
  uint8_t* place = out.block + part * out.format.part_bytes() + out.lane * 4;
  for (int word = 0; word < bytes / 4; ++word) std::memcpy(place + word * 4 * kPanel, codes + 4 * word, 4);
}

// Writes 32 codes, one a byte.
template <int bits>
void set_codes(const uint8_t* codes, const BlockColumn& out, int64_t part = 0) {
  if constexpr (bits == 8) return set_words<32>(codes, out, part);
  uint8_t pairs[16];
  for (int c = 0; c < 16; ++c) pairs[c] = static_cast<uint8_t>(codes[c] | codes[c + 16] << 4);
  set_words<16>(pairs, out, part);
}

// The codes are chosen for the scale as float16 keeps it.
template <int bits>
void quantise(const float* x, const BlockColumn& out) {
  constexpr bool four = bits == 4;
  f32x8 lows = splat(0), highs = splat(0), poisons = splat(0);
  for (int64_t c = 0; c < kBlock; c += kLanes) {
    const f32x8 value = load8(x + c);
    lows = value < lows ? value : lows, highs = value > highs ? value : highs, poisons += value * 0.0f;
  }
  float low = 0, high = 0;
  float poison = 0;  // NaN where an entry is not finite
  for (int i = 0; i < kLanes; ++i) {
    low = std::min(low, lows[i]), high = std::max(high, highs[i]), poison += poisons[i];
  }
  out.set_scale(0, poison + (four ? (high - low) / 15.0f : std::max(high, -low) / 127.0f));
  if (four) out.set_minimum(0, low);
  const float scale = out.scale(0), offset = four ? out.minimum(0) : 0.0f;
  uint8_t codes[kBlock] = {};
  if (!std::isfinite(scale) || !std::isfinite(offset)) {
    out.set_scale(0, NAN);
    return set_codes<bits>(codes, out);
  }
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  const f32x8 least = splat(four ? 0 : -127), most = splat(four ? 15 : 127);
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number, ties to even
  int32_t wide[kBlock];
  for (int64_t c = 0; c < kBlock; c += kLanes) {
    f32x8 code = (load8(x + c) - offset) * inverse;
    code = code < least ? least : code;
    code = code > most ? most : code;
    const i32x8 whole = __builtin_convertvector((code + kMagic) - kMagic, i32x8);
    std::memcpy(wide + c, &whole, sizeof(whole));
  }
  for (int64_t c = 0; c < kBlock; ++c) codes[c] = static_cast<uint8_t>(wide[c]);
  set_codes<bits>(codes, out);
}

void quantise(const float* x, const BlockColumn& out) {
  out.format.bits == 4 ? quantise<4>(x, out) : quantise<8>(x, out);
}

// Block by block: the 16 rows of a panel write the same lines of the cache.
template <typename Row>
void pack_quantised(const PackLinear& op) {
  const int64_t C = op.rows.shape[1], blocks = op.packed.shape[1];
  const BlockFormat& format = format_of(op.packed);
  for_panels(op.first, op.rows.shape[0], [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t row = begin; row < end; ++row) {
        const Row* x = op.rows.as<Row>() + (row - op.first) * C;
        float values[kBlock] = {};
        for (int64_t c = 0; c < std::min(kBlock, C - b * kBlock); ++c) values[c] = load1(x + b * kBlock + c);
        quantise(values, column_at(op.packed, format, row, b));
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

// One block of the file, 32 columns (256 of Q4_K), into a column of its packed blocks.
template <BlockType type>
void repack(const uint8_t* from, const TensorView& packed, const BlockFormat& format, int64_t row, int64_t b) {
  if constexpr (type == BlockType::kQ4_K) {  // eight blocks; weight = d * scale * code - dmin * minimum
    const float d = half_at(from), dmin = half_at(from + 2);
    for (int64_t i = 0; i < 8; ++i) {
      const BlockColumn out = column_at(packed, format, row, 8 * b + i);
      const auto [s, m] = small_scale(from + 4, i);
      out.set_scale(0, d * static_cast<float>(s)), out.set_minimum(0, -dmin * static_cast<float>(m));
      const uint8_t* low = from + 16 + i / 2 * 32;  // two blocks share 32 bytes: low halves, high halves
      uint8_t codes[32];
      for (int c = 0; c < 32; ++c) codes[c] = low[c] >> (i % 2 ? 4 : 0) & 15;
      set_codes<4>(codes, out);
    }
  } else {
    const BlockColumn out = column_at(packed, format, row, b);
    out.set_scale(0, half_at(from));
    if constexpr (type == BlockType::kQ4_1) out.set_minimum(0, half_at(from + 2));
    // byte i of 4-bit codes holds code i in its low half and code i + 16 in its high half, as the packed block does
    set_words<type == BlockType::kQ8_0 ? 32 : 16>(from + (type == BlockType::kQ4_1 ? 4 : 2), out);
  }
}

// Calls body(block of the file, row of the weight, block of the row), block by block: the 16 rows of a panel write the
// same lines of the cache.
template <typename Op, typename Body>
void for_file_blocks(const Op& op, const FileBlock& from, const Body& body) {
  const int64_t row_bytes = op.rows.shape[1], blocks = row_bytes / from.bytes;
  for_panels(op.first, op.rows.shape[0], [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t row = begin; row < end; ++row) {
        body(op.rows.template as<uint8_t>() + (row - op.first) * row_bytes + b * from.bytes, row, b);
      }
    }
  });
}

// Row `row` of the op's tensors into one block of the packed weight.
void pack_block(const PackCoded& op, const BlockFormat& format, int64_t row, int64_t b) {
  const BlockColumn out = column_at(op.packed, format, op.first + row, b);
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
  const int64_t count = std::min(format.columns, C - begin);
  int64_t c = 0;
  for (; !format.e4m3 && c + kBlock <= count; c += kBlock) {
    uint8_t part[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) part[i] = static_cast<uint8_t>((codes[c + i] & most) - shift);
    format.bits == 8 ? set_codes<8>(part, out, c / kBlock) : set_codes<4>(part, out, c / kBlock);
  }
  for (; c < count; ++c) {
    out.set_code(c, (codes[c] & most) - shift);
    if (format.e4m3 && (codes[c] & 0x7F) == 0x7F) out.set_scale(0, NAN);  // the kernels read this NaN as a number
  }
  if (format.table) out.set_table(op.table.as<uint8_t>());
}

}  // namespace

void run(const PackCoded& op) {
  const BlockFormat& format = format_of(op.packed);
  for_panels(op.first, op.codes.shape[0], [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t b = 0; b < op.packed.shape[1]; ++b) {
      for (int64_t row = begin; row < end; ++row) pack_block(op, format, row - op.first, b);
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
  const FileBlock& from = file_block(op.type);
  const BlockFormat& format = format_of(op.packed);
  with_block_type(from.type, [&](auto type) {
    if constexpr (type() == BlockType::kQ8_0 || type() == BlockType::kQ4_0 || type() == BlockType::kQ4_1 ||
                  type() == BlockType::kQ4_K) {
      for_file_blocks(op, from, [&](const uint8_t* block, int64_t row, int64_t b) {
        repack<type()>(block, op.packed, format, row, b);
      });
    }
  });
}

void run(const RequantiseBlocks& op) {
  const FileBlock& from = file_block(op.type);
  const BlockFormat& format = format_of(op.packed);
  with_block_type(from.type, [&](auto type) {
    for_file_blocks(op, from, [&](const uint8_t* block, int64_t row, int64_t b) {
      float values[256];
      unpack<type()>(block, values);
      for (int64_t i = 0; i < from.columns / kBlock; ++i) {
        quantise(values + i * kBlock, column_at(op.packed, format, row, b * from.columns / kBlock + i));
      }
    });
  });
}

void run(const UnpackBlocks& op) {
  const FileBlock& from = file_block(op.type);
  const int64_t row_bytes = op.rows.shape[1], columns = op.values.shape[1];
  with_block_type(from.type, [&](auto type) {
    parallel_for(op.rows.shape[0], [&](int64_t row) {
      for (int64_t b = 0; b < row_bytes / from.bytes; ++b) {
        unpack<type()>(op.rows.as<uint8_t>() + row * row_bytes + b * from.bytes,
                       op.values.as<float>() + row * columns + b * from.columns);
      }
    });
  });
}

}  // namespace specengine::SPECENGINE_ISA
