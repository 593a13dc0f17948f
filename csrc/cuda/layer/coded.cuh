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
constexpr int kHalves = 2;  // of a panel: the rows l / 4 and l / 4 + 8 of a lane l

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

// What is added to integer codes where they become the last bits of a float's fraction.
template <CodedKind kKind>
constexpr float kAdded = bits_of(kKind) == 4 ? 128.0f : 0x1p23f;

// How a value is made of the number of a code.
//   kScaled: (number - base) * scale          kMinima: (number - base) * scale + minimum
//   kFused: number * scale - base * scale, for 4-bit integers with 16-bit scales: base * scale is exact, and so the
//   fused product and sum round as (number - base) * scale does. A scale that is infinite or above 2^119 gives NaN.
enum class CodedValue : uint8_t { kScaled, kFused, kMinima };

// The number of byte `byte` of a word, exact; of integers kAdded more.
template <CodedKind kKind>
__device__ inline float number_of(unsigned word, int byte) {
  if constexpr (kKind == CodedKind::kInt4) {
    return __uint_as_float(__byte_perm(word, 0x43000000, 0x7044 + (byte << 8)));
  } else if constexpr (kKind == CodedKind::kInt8) {
    return __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 + byte));
  } else {
    using Code = FloatCode<kKind>;
    const int top = static_cast<int>(__byte_perm(word, 0, 0x0444 + (byte << 12)));
    return __uint_as_float(static_cast<unsigned>(top >> Code::kShift) & Code::kMask) * Code::kPower;
  }
}

// added: the minimum, or what kFused adds.
struct CodedGroup {
  float scale, base, added;
};

// row: of the panel.  column: of the chunk.  Reads the groups of kCount rows: row, row + 8, then the same of the next
// tile's chunk.
template <CodedKind kKind, CodedValue kValue, int kCount>
__device__ inline void load_groups(CodedGroup (&groups)[kCount], const unsigned char* chunk, const CodedChunk& form,
                                   int row, int column) {
  const int first = (column >> form.group_bits) * kCodedRows + row;
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      body(groups[i], chunk + i / kHalves * form.bytes, first + i % kHalves * (kCodedRows / kHalves));
  };
  const auto load = [&](const auto& number) {
    each([&](CodedGroup& group, const unsigned char* from, int place) {
      group.scale = number(from + form.scales_at, place);
      if constexpr (kValue == CodedValue::kMinima) group.added = number(from + form.minima_at, place);
    });
  };
  if (form.scales == CodedScales::kFloat32) {
    load([](const unsigned char* from, int place) { return reinterpret_cast<const float*>(from)[place]; });
  } else {
    const bool half = form.scales == CodedScales::kFloat16;
    load([half](const unsigned char* from, int place) {
      const uint16_t bits = reinterpret_cast<const uint16_t*>(from)[place];
      return half ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<unsigned>(bits) << 16);
    });
  }
  if constexpr (is_integer(kKind)) {
    const float middle = form.offset == CodedOffset::kMiddle ? static_cast<float>(1 << (bits_of(kKind) - 1)) : 0;
    each([&](CodedGroup& group, const unsigned char*, int) { group.base = kAdded<kKind> + middle; });
    if (form.offset == CodedOffset::kZeros) {
      each([&](CodedGroup& group, const unsigned char* from, int place) {
        group.base += static_cast<float>(from[form.zeros_at + place]);
      });
    }
  }
  if constexpr (kValue == CodedValue::kFused) {
    each([](CodedGroup& group, const unsigned char*, int) { group.added = -__fmul_rn(group.base, group.scale); });
  }
}

// The values of 8 columns. Every operation rounds by itself, as PyTorch's do.
template <CodedKind kKind, CodedValue kValue>
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
    const float number =
        bits_of(kKind) == 8 ? number_of<kKind>(bytes[j / 4], j % 4) : number_of<kKind>(bytes[j % 2], j / 2);
    if constexpr (kValue == CodedValue::kFused) {
      values[j] = fmaf(number, group.scale, group.added);
    } else {
      values[j] = __fmul_rn(is_integer(kKind) ? number - group.base : number, group.scale);
      if constexpr (kValue == CodedValue::kMinima) values[j] = __fadd_rn(values[j], group.added);
    }
  }
}

// Calls body with kind and way of the values, as types' values.
template <typename Body>
void with_kind(const CodedChunk& form, const Body& body) {
  const auto call = [&]<CodedKind kKind, CodedValue kValue = CodedValue::kScaled>() {
    body(std::integral_constant<CodedKind, kKind>{}, std::integral_constant<CodedValue, kValue>{});
  };
  switch (form.kind) {
    case CodedKind::kInt4:
      if (form.offset == CodedOffset::kMinima) return call.template operator()<CodedKind::kInt4, CodedValue::kMinima>();
      if (form.scales == CodedScales::kFloat32) return call.template operator()<CodedKind::kInt4>();
      return call.template operator()<CodedKind::kInt4, CodedValue::kFused>();
    case CodedKind::kInt8:
      return call.template operator()<CodedKind::kInt8>();
    case CodedKind::kE4m3:
      return call.template operator()<CodedKind::kE4m3>();
    case CodedKind::kE2m1:
      return call.template operator()<CodedKind::kE2m1>();
  }
}

}  // namespace specengine
