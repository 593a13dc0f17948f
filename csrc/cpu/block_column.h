// One column of a block of a coded weight; ops/packed_weight.h has the layout.
#pragma once
#include "cpu/float_types.h"
#include "cpu/simd.h"
#include "ops/packed_weight.h"

namespace specengine::SPECENGINE_ISA {

// A float8 of 4 exponent and 3 mantissa bits: a half of the same bits, less 8 in the exponent.
inline float load_e4m3(uint8_t code) {
  const half bits{static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7F) << 7)};
  return (code & 0x7F) == 0x7F ? NAN : load1(&bits) * 256.0f;
}

// One output column of a block, written and read code by code. value() turns a code into its number; the linear layers
// do the same for whole registers (cpu/linear/dot_codes.h, cpu/linear/kernels.h).
struct BlockColumn {
  uint8_t* block;
  const BlockFormat& format;
  int64_t lane;

  void set_code(int64_t c, int code) const {
    if (format.bits == 8) return void(block[place8(c)] = static_cast<uint8_t>(code));
    uint8_t& both = block[place4(c)];
    both = static_cast<uint8_t>(c % kBlock < 16 ? (both & 0xF0) | code : (both & 0x0F) | code << 4);
  }
  // 16-bit formats round.
  void set_scale(int64_t group, float scale) const { set(format.scales_at(), group, scale); }
  void set_minimum(int64_t group, float minimum) const { set(format.minima_at(), group, minimum); }
  void set_zero(int64_t group, int zero) const { *zero_at(group) = static_cast<uint8_t>(zero); }
  void set_table(const uint8_t* table) const { std::memcpy(block + format.table_at(), table, 16); }

  float scale(int64_t group) const { return get(format.scales_at(), group); }
  float minimum(int64_t group) const { return get(format.minima_at(), group); }

  float value(int64_t c) const {
    const int64_t group = c / format.group;
    if (format.e4m3) return scale(group) * load_e4m3(block[place8(c)]);
    int number =
        format.bits == 8 ? static_cast<int8_t>(block[place8(c)]) : block[place4(c)] >> (c % kBlock < 16 ? 0 : 4) & 15;
    if (format.table) number = static_cast<int8_t>(block[format.table_at() + number]);
    if (format.zeros) number -= format.bits == 8 ? static_cast<int8_t>(*zero_at(group)) : *zero_at(group);
    const auto exact = static_cast<float>(number - format.fixed_zero);
    return format.minima ? fmadd(scale(group), exact, minimum(group)) : scale(group) * exact;
  }

 private:
  int64_t place8(int64_t c) const { return format.e4m3 ? c * kPanel + lane : c / 4 * 4 * kPanel + lane * 4 + c % 4; }
  int64_t place4(int64_t c) const {
    return c / kBlock * format.part_bytes() + c % 16 / 4 * 4 * kPanel + lane * 4 + c % 4;
  }
  uint8_t* zero_at(int64_t group) const { return block + format.zeros_at() + group * kPanel + lane; }
  void set(int64_t at, int64_t group, float x) const {
    uint8_t* place = block + at + (group * kPanel + lane) * format.scale_size;
    format.scale_size == 2 ? store1(reinterpret_cast<half*>(place), x) : store1(reinterpret_cast<float*>(place), x);
  }
  float get(int64_t at, int64_t group) const {
    const uint8_t* place = block + at + (group * kPanel + lane) * format.scale_size;
    return format.scale_size == 2 ? load1(reinterpret_cast<const half*>(place))
                                  : load1(reinterpret_cast<const float*>(place));
  }
};

inline BlockColumn block_column(const TensorView& packed, int64_t row, int64_t b) {
  const int64_t blocks = packed.shape[1], bytes = packed.shape[2];
  return {packed.as<uint8_t>() + (row / kPanel * blocks + b) * bytes, format_of(packed), row % kPanel};
}

}  // namespace specengine::SPECENGINE_ISA
