// From codes to numbers, in registers: ops/coded/form.h has the layout of a chunk.
#pragma once
#include <type_traits>

#include "cuda/base/arch.cuh"
#include "ops/coded/form.h"

namespace specengine {

constexpr int kColumns = 8;  // that a lane has side by side: of 32
template <CodedKind kKind>
constexpr int kCodeWords = bits_of(kKind) / 4;  // that hold 8 columns
constexpr int kPieceBytes = 16;

// How the bits of a small float are those of a float32: the sign stays, exponent and fraction move down, and a power of
// two corrects the exponent's bias. Subnormal numbers are exact too. e4m3's NaNs become +-480: packing makes their
// scales NaN.
template <CodedKind kKind>
struct FloatCode;
template <>
struct FloatCode<CodedKind::kE4m3> {
  static constexpr int kShift = 4;
  static constexpr unsigned kMask = 0x87F00000;
  static constexpr float kPower = 0x1p120f;
};
template <>
struct FloatCode<CodedKind::kE2m1> {
  static constexpr int kShift = 6;
  static constexpr unsigned kMask = 0x81C00000;
  static constexpr float kPower = 0x1p126f;
};

// 2^23, of whose fraction an integer code is the last bits.
constexpr float kInteger = 0x1p23f;

// The number of byte `byte` of a word, exact. base: kInteger plus the zero point.
template <CodedKind kKind>
__device__ inline float number_of(unsigned word, int byte, float base) {
  if constexpr (is_integer(kKind)) {
    return __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 + byte)) - base;
  } else {
    using Code = FloatCode<kKind>;
    const int top = static_cast<int>(__byte_perm(word, 0, 0x0444 + (byte << 12)));
    return __uint_as_float(static_cast<unsigned>(top >> Code::kShift) & Code::kMask) * Code::kPower;
  }
}

// A group's scale, its minimum, and the base of its numbers.
struct CodedGroup {
  float scale, minimum, base;
};

__device__ inline float load_scale(const unsigned char* scales, int place, CodedScales type) {
  if (type == CodedScales::kFloat32) return reinterpret_cast<const float*>(scales)[place];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(scales)[place];
  return type == CodedScales::kFloat16 ? __half2float(__ushort_as_half(bits))
                                       : __uint_as_float(static_cast<unsigned>(bits) << 16);
}

// row: of the panel.  column: of the chunk.
template <bool kMinima>
__device__ inline CodedGroup load_group(const unsigned char* chunk, const CodedChunk& form, int row, int column) {
  const int place = (column >> form.group_bits) * kCodedRows + row;
  CodedGroup group{load_scale(chunk + form.scales_at, place, form.scales), 0, kInteger};
  if constexpr (kMinima) group.minimum = load_scale(chunk + form.minima_at, place, form.scales);
  if (form.offset == CodedOffset::kZeros) group.base += static_cast<float>(chunk[form.zeros_at + place]);
  if (form.offset == CodedOffset::kMiddle) group.base += static_cast<float>(1 << (bits_of(form.kind) - 1));
  return group;
}

// The values of 8 columns. Every operation rounds by itself, as PyTorch's do.
template <CodedKind kKind, bool kMinima>
__device__ inline void values_of(float (&values)[kColumns], const unsigned (&words)[kCodeWords<kKind>],
                                 const CodedGroup& group) {
  unsigned bytes[2];  // of 4-bit codes: the even columns, the odd ones
  if constexpr (bits_of(kKind) == 8) {
    bytes[0] = words[0], bytes[1] = words[1];
  } else if constexpr (is_integer(kKind)) {
    bytes[0] = words[0] & 0x0F0F0F0F, bytes[1] = words[0] >> 4 & 0x0F0F0F0F;
  } else {
    bytes[0] = words[0] << 4 & 0xF0F0F0F0, bytes[1] = words[0] & 0xF0F0F0F0;
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const float number = bits_of(kKind) == 8 ? number_of<kKind>(bytes[j / 4], j % 4, group.base)
                                             : number_of<kKind>(bytes[j % 2], j / 2, group.base);
    values[j] = __fmul_rn(number, group.scale);
    if constexpr (kMinima) values[j] = __fadd_rn(values[j], group.minimum);
  }
}

// Calls body with the kind, and whether there are minima, as types' values.
template <typename Body>
void with_kind(const CodedChunk& form, const Body& body) {
  using std::integral_constant;
  switch (form.kind) {
    case CodedKind::kInt4:
      if (form.offset == CodedOffset::kMinima) {
        return body(integral_constant<CodedKind, CodedKind::kInt4>{}, std::true_type{});
      }
      return body(integral_constant<CodedKind, CodedKind::kInt4>{}, std::false_type{});
    case CodedKind::kInt8:
      return body(integral_constant<CodedKind, CodedKind::kInt8>{}, std::false_type{});
    case CodedKind::kE4m3:
      return body(integral_constant<CodedKind, CodedKind::kE4m3>{}, std::false_type{});
    case CodedKind::kE2m1:
      return body(integral_constant<CodedKind, CodedKind::kE2m1>{}, std::false_type{});
  }
}

}  // namespace specengine
