// Values of the blocks of GGUF files (ggml's block_* structs), with the roundings of the gguf package.
#pragma once
#include "cpu/float_types.h"
#include "ops/file_blocks.h"

namespace specengine::SPECENGINE_ISA {

inline float half_at(const uint8_t* p) {
  half x;
  std::memcpy(&x, p, sizeof(x));
  return load1(&x);
}

// The 6-bit scale and minimum i of a block of Q4_K or Q5_K.  small: the 12 bytes that hold eight of each.
struct SmallScale {
  int scale, minimum;
};
inline SmallScale small_scale(const uint8_t* small, int64_t i) {
  if (i < 4) return {small[i] & 63, small[i + 4] & 63};
  return {(small[i + 4] & 15) | small[i - 4] >> 6 << 4, small[i + 4] >> 4 | small[i] >> 6 << 4};
}

// 32 codes of 4 bits: byte c holds codes c and c + 16.
inline void codes4(const uint8_t* low, uint8_t* codes) {
  for (int c = 0; c < 16; ++c) codes[c] = low[c] & 15, codes[c + 16] = low[c] >> 4;
}

// The same with a fifth bit: bit c of `high` is that of code c.
inline void codes5(const uint8_t* low, const uint8_t* high, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, high, sizeof(bits));
  uint32_t fifth[32];
  for (uint32_t c = 0; c < 32; ++c) fifth[c] = bits >> c << 4 & 16;
  codes4(low, codes);
  for (int c = 0; c < 32; ++c) codes[c] |= static_cast<uint8_t>(fifth[c]);
}

// Writes the values of one block.
template <BlockType type>
void unpack(const uint8_t* from, float* values) {
  if constexpr (type == BlockType::kQ8_0) {
    const float d = half_at(from);
    for (int c = 0; c < 32; ++c) values[c] = static_cast<float>(static_cast<int8_t>(from[2 + c])) * d;
  } else if constexpr (type == BlockType::kQ4_0 || type == BlockType::kQ5_0) {
    const float d = half_at(from);
    uint8_t codes[32];
    type == BlockType::kQ5_0 ? codes5(from + 6, from + 2, codes) : codes4(from + 2, codes);
    const int middle = type == BlockType::kQ5_0 ? 16 : 8;
    for (int c = 0; c < 32; ++c) values[c] = d * static_cast<float>(codes[c] - middle);
  } else if constexpr (type == BlockType::kQ4_1 || type == BlockType::kQ5_1) {
    const float d = half_at(from), m = half_at(from + 2);
    uint8_t codes[32];
    type == BlockType::kQ5_1 ? codes5(from + 8, from + 4, codes) : codes4(from + 4, codes);
    for (int c = 0; c < 32; ++c) values[c] = d * static_cast<float>(codes[c]) + m;
  } else if constexpr (type == BlockType::kQ4_K || type == BlockType::kQ5_K) {
    constexpr bool fifth = type == BlockType::kQ5_K;
    const float d = half_at(from), dmin = half_at(from + 2);
    for (int i = 0; i < 8; ++i) {
      const auto [s, m] = small_scale(from + 4, i);
      const float scale = d * static_cast<float>(s), minimum = dmin * static_cast<float>(m);
      const uint8_t* low = from + (fifth ? 48 : 16) + i / 2 * 32;  // two parts share 32 bytes: low and high halves
      for (int c = 0; c < 32; ++c) {
        int code = low[c] >> (i % 2 ? 4 : 0) & 15;
        if constexpr (fifth) code |= (from[16 + c] >> i & 1) << 4;
        values[32 * i + c] = scale * static_cast<float>(code) - minimum;
      }
    }
  } else {
    static_assert(type == BlockType::kQ6_K);
    const float d = half_at(from + 208);
    for (int part = 0; part < 16; ++part) {  // 16 values share a scale
      const int row = part / 2;              // of 32 values
      const uint8_t* low = from + row / 4 * 64 + row % 2 * 32 + part % 2 * 16;
      const uint8_t* high = from + 128 + row / 4 * 32 + part % 2 * 16;
      const float scale = d * static_cast<float>(static_cast<int8_t>(from[192 + part]));
      const int low_shift = row % 4 < 2 ? 0 : 4, high_shift = 2 * (row % 4);
      for (int c = 0; c < 16; ++c) {
        const int code = (low[c] >> low_shift & 15) | (high[c] >> high_shift & 3) << 4;
        values[16 * part + c] = scale * static_cast<float>(code - 32);
      }
    }
  }
}

// Calls body with the type as a constant.
template <typename Body>
void with_block_type(BlockType type, const Body& body) {
  switch (type) {
#define SPECENGINE_CASE(name) \
  case BlockType::name:       \
    return body(std::integral_constant<BlockType, BlockType::name>{});
    SPECENGINE_CASE(kQ8_0)
    SPECENGINE_CASE(kQ4_0)
    SPECENGINE_CASE(kQ4_1)
    SPECENGINE_CASE(kQ5_0)
    SPECENGINE_CASE(kQ5_1)
    SPECENGINE_CASE(kQ4_K)
    SPECENGINE_CASE(kQ5_K)
    SPECENGINE_CASE(kQ6_K)
#undef SPECENGINE_CASE
  }
}

}  // namespace specengine::SPECENGINE_ISA
