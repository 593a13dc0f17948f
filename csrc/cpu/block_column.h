// One column of a block of a quantised weight; ops/packed_weight.h has the layout.
#pragma once
#include "cpu/float_types.h"
#include "cpu/simd.h"
#include "ops/packed_weight.h"

namespace specengine::SPECENGINE_ISA {

// One output column of a quantised block, written and read code by code. value() turns a 4-bit or 8-bit code into its
// number; the linear layers do the same for whole registers (cpu/dot_codes.h).
struct BlockColumn {
  uint8_t* block;
  int64_t bytes, lane;

  bool four_bits() const { return bytes != kQ8Bytes; }
  int64_t code_bytes() const { return four_bits() ? kPanel * kBlock / 2 : kPanel * kBlock; }
  half* scale() const { return reinterpret_cast<half*>(block + code_bytes()) + lane; }
  half* minimum() const { return scale() + kPanel; }
  static int64_t place(int64_t c, int64_t lane) { return c / 4 * 4 * kPanel + lane * 4 + c % 4; }

  void set_code(int64_t c, int code) const {
    if (!four_bits()) return void(block[place(c, lane)] = static_cast<uint8_t>(code));
    uint8_t& both = block[place(c % 16, lane)];
    both = static_cast<uint8_t>(c < 16 ? (both & 0xF0) | code : (both & 0x0F) | code << 4);
  }
  float value(int64_t c) const {
    const float d = load1(scale());
    if (!four_bits()) return d * static_cast<float>(static_cast<int8_t>(block[place(c, lane)]));
    const int code = block[place(c % 16, lane)] >> (c < 16 ? 0 : 4) & 15;
    return bytes == kQ4Bytes ? d * static_cast<float>(code - 8) : fmadd(d, static_cast<float>(code), load1(minimum()));
  }
};

inline BlockColumn block_column(const TensorView& packed, int64_t row, int64_t b) {
  const int64_t blocks = packed.shape[1], bytes = packed.shape[2];
  return {packed.as<uint8_t>() + (row / kPanel * blocks + b) * bytes, bytes, row % kPanel};
}

}  // namespace specengine::SPECENGINE_ISA
