// Here linear layers turn 4-bit or 8-bit codes into numbers: integer dot products of a block with int8 rows, then
// total() as float, which linear.cpp multiplies by the scales. A step multiplies the codes of a slice of the
// panel's columns (as many as a register has lanes) by four columns of a row. All sums are exact, so every instruction
// set gives the same integers.
#pragma once
#include <type_traits>

#include "cpu/simd.h"
#include "ops/linear.h"

namespace specengine::SPECENGINE_ISA {

constexpr int kLanesPerSlice = kLanesOf<Vector>;
constexpr int kSlices = kPanel / kLanesPerSlice;

inline int32_t four_codes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return four;
}

// GCC reorders the steps of a block and runs out of registers, which costs half the speed. This emits no instruction,
// but GCC must have computed the sum here.
template <typename Sum>
void settle(Sum& sum) {
  if constexpr (!std::is_class_v<Sum>) asm volatile("" : "+x"(sum));
}

// Bytes [slice] of the 64 that hold four columns of all 16 outputs.
constexpr int kStep = 4 * kPanel, kSliceBytes = 4 * kLanesPerSlice;

#if defined(__AVX512F__)
using Bytes = __m512i;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_halves(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes b) { return low_halves(_mm512_srli_epi16(b, 4)); }
inline Bytes flip_signs(Bytes b) { return _mm512_xor_si512(b, _mm512_set1_epi8(-128)); }
inline Bytes splat_four(const int8_t* p) { return _mm512_set1_epi32(four_codes(p)); }
inline Vector to_float(Bytes sums) { return _mm512_cvtepi32_ps(sums); }
inline Bytes add32(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
inline Bytes splat32(int32_t x) { return _mm512_set1_epi32(x); }
template <int kShift>
Bytes sign_extend(Bytes b) {  // of the byte that ends kShift bits below the top
  return _mm512_maskz_srai_epi32(0xFFFF, _mm512_maskz_slli_epi32(0xFFFF, b, kShift), 24);
}
inline Bytes load_table(const uint8_t* p) {  // the same 16 bytes in every 128 bits
  return _mm512_maskz_broadcast_i32x4(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes look_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }
inline Vector small_floats(const uint8_t* p) {
  return to_float(_mm512_maskz_cvtepu8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vector small_floats(const int8_t* p) {
  return to_float(_mm512_maskz_cvtepi8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__)
using Bytes = __m256i;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes low_halves(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline Bytes high_halves(Bytes b) { return low_halves(_mm256_srli_epi16(b, 4)); }
inline Bytes flip_signs(Bytes b) { return _mm256_xor_si256(b, _mm256_set1_epi8(-128)); }
inline Bytes splat_four(const int8_t* p) { return _mm256_set1_epi32(four_codes(p)); }
inline Vector to_float(Bytes sums) { return reinterpret_cast<Vector>(_mm256_cvtepi32_ps(sums)); }
inline Bytes add32(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
inline Bytes splat32(int32_t x) { return _mm256_set1_epi32(x); }
template <int kShift>
Bytes sign_extend(Bytes b) {  // of the byte that ends kShift bits below the top
  return _mm256_srai_epi32(_mm256_slli_epi32(b, kShift), 24);
}
inline Bytes load_table(const uint8_t* p) {  // the same 16 bytes in every 128 bits
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes look_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }
inline Vector small_floats(const uint8_t* p) {
  return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vector small_floats(const int8_t* p) {
  return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#else
template <typename Small>
Vector small_floats(const Small* p) {
  Vector v;
  for (int i = 0; i < kLanesPerSlice; ++i) v[i] = static_cast<float>(p[i]);
  return v;
}
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define SPECENGINE_DOT_BYTES 1  // one instruction multiplies unsigned by signed bytes and adds four products to 32 bits
#if defined(__AVX512VNNI__)
inline Bytes dot_bytes(Bytes sum, Bytes codes, Bytes x) { return _mm512_dpbusd_epi32(sum, codes, x); }
#else
inline Bytes dot_bytes(Bytes sum, Bytes codes, Bytes x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
#endif
#elif defined(__AVX2__)
#if defined(__AVX512F__)
inline Bytes pairs16(Bytes codes, Bytes x) { return _mm512_maddubs_epi16(codes, x); }
inline Bytes pairs32(Bytes sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
inline Bytes add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline Bytes magnitude(Bytes b) { return _mm512_abs_epi8(b); }
inline Bytes with_sign(Bytes x, Bytes b) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(b), _mm512_setzero_si512(), x);
}
#else
inline Bytes pairs16(Bytes codes, Bytes x) { return _mm256_maddubs_epi16(codes, x); }
inline Bytes pairs32(Bytes sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
inline Bytes add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline Bytes magnitude(Bytes b) { return _mm256_abs_epi8(b); }
inline Bytes with_sign(Bytes x, Bytes b) { return _mm256_sign_epi8(x, b); }
#endif
#endif

// Where a format has the scales and minima of a group of columns. A zero is a minimum of -zero * scale.
template <const BlockFormat& kOwnFormat>
struct CodesBase {
  static constexpr const BlockFormat& kFormat = kOwnFormat;
  static constexpr bool kHasMinimum = kFormat.minima || kFormat.zeros;

  static Vector scale(const uint8_t* block, int64_t group, int slice) {
    return at(block + kFormat.scales_at(), group, slice);
  }
  static Vector minimum(const uint8_t* block, int64_t group, int slice, Vector scale) {
    if constexpr (kFormat.minima) {
      return at(block + kFormat.minima_at(), group, slice);
    } else {
      return zeros(block, group, slice) * -scale;
    }
  }
  // The weight of a code's number, as BlockColumn::value has it.
  static Vector value(Vector number, const uint8_t* block, int64_t group, int slice, Vector scale) {
    if constexpr (kFormat.minima) {
      return fmadd(scale, number, at(block + kFormat.minima_at(), group, slice));
    } else if constexpr (kFormat.zeros) {
      return scale * (number - zeros(block, group, slice));
    } else {
      return scale * (number - splat_of<Vector>(static_cast<float>(kFormat.fixed_zero)));
    }
  }
  static const uint8_t* codes(const uint8_t* block, int part, int step) {
    return block + part * kFormat.part_bytes() + step * kStep;
  }

 private:
  static Vector zeros(const uint8_t* block, int64_t group, int slice) {
    using Zero = std::conditional_t<kFormat.bits == 8, int8_t, uint8_t>;
    const uint8_t* first = block + kFormat.zeros_at() + group * kPanel + slice * kLanesPerSlice;
    return small_floats(reinterpret_cast<const Zero*>(first));
  }
  static Vector at(const uint8_t* floats, int64_t group, int slice) {
    using Scale = std::conditional_t<kFormat.scale_size == 2, half, float>;
    return load<Vector>(reinterpret_cast<const Scale*>(floats) + group * kPanel + slice * kLanesPerSlice);
  }
};

// The numbers of four columns.
struct FourNumbers {
  Vector of[4];
};

// Codes are multiplied four columns at a time: load() gives those of step 0 to 7 of a part of 32 columns, add() adds
// their products with four columns of a row, total() is the exact sum. code_sum: of the columns that were added.

#if defined(__AVX2__)
// Bytes -128..127, all of them as loaded.
struct SignedBytes {
  using Sum = Bytes;
#if defined(SPECENGINE_DOT_BYTES)
  using Codes = Bytes;
  // Unsigned codes are 128 too large; total() subtracts that again.
  static Codes of(Bytes codes) { return flip_signs(codes); }
  static void add(Sum& sum, Codes codes, const int8_t* x) { sum = dot_bytes(sum, codes, splat_four(x)); }
  static Vector total(Sum sum, int32_t code_sum) { return to_float(add32(sum, splat32(-128 * code_sum))); }
#else
  struct Codes {
    Bytes size, sign;
  };
  static Codes of(Bytes codes) { return {magnitude(codes), codes}; }
  // |code| <= 128 and |x| <= 127: a pair of products fits 16 bits.
  static void add(Sum& sum, const Codes& codes, const int8_t* x) {
    sum = add32(sum, pairs32(pairs16(codes.size, with_sign(splat_four(x), codes.sign))));
  }
  static Vector total(Sum sum, int32_t) { return to_float(sum); }
#endif
};

// Byte k of every 32 bits, with its sign.
inline FourNumbers four_numbers(Bytes bytes) {
  return {to_float(sign_extend<24>(bytes)), to_float(sign_extend<16>(bytes)), to_float(sign_extend<8>(bytes)),
          to_float(sign_extend<0>(bytes))};
}

inline Bytes load_halves(const uint8_t* both, bool high) {
  return high ? high_halves(load_bytes(both)) : low_halves(load_bytes(both));
}

template <const BlockFormat& kOwnFormat>
struct Codes8 : CodesBase<kOwnFormat>, SignedBytes {
  static Codes load(const uint8_t* block, int part, int step, int slice) {
    return of(load_bytes(Codes8::codes(block, part, step) + slice * kSliceBytes));
  }
  static FourNumbers numbers(const uint8_t* block, int part, int step, int slice) {
    return four_numbers(load_bytes(Codes8::codes(block, part, step) + slice * kSliceBytes));
  }
};

template <const BlockFormat& kOwnFormat>
struct Codes4 : CodesBase<kOwnFormat> {
  using Sum = Bytes;
  static Bytes load(const uint8_t* block, int part, int step, int slice) {
    return load_halves(Codes4::codes(block, part, step % 4) + slice * kSliceBytes, step >= 4);
  }
  static FourNumbers numbers(const uint8_t* block, int part, int step, int slice) {
    return four_numbers(load(block, part, step, slice));
  }
#if defined(SPECENGINE_DOT_BYTES)
  static void add(Sum& sum, Bytes codes, const int8_t* x) { sum = dot_bytes(sum, codes, splat_four(x)); }
#else
  // The eight steps of a block fit 16 bits: 8 * 2 * 15 * 127 = 30480.
  static void add(Sum& sum, Bytes codes, const int8_t* x) { sum = add16(sum, pairs16(codes, splat_four(x))); }
#endif
  static Vector total(Sum sum, int32_t code_sum) {
#if !defined(SPECENGINE_DOT_BYTES)
    sum = pairs32(sum);
#endif
    return to_float(kOwnFormat.fixed_zero == 0 ? sum : add32(sum, splat32(-kOwnFormat.fixed_zero * code_sum)));
  }
};

template <const BlockFormat& kOwnFormat>
struct TableCodes : CodesBase<kOwnFormat>, SignedBytes {
  static Codes load(const uint8_t* block, int part, int step, int slice) {
    return of(looked_up(block, part, step, slice));
  }
  static FourNumbers numbers(const uint8_t* block, int part, int step, int slice) {
    return four_numbers(looked_up(block, part, step, slice));
  }

 private:
  static Bytes looked_up(const uint8_t* block, int part, int step, int slice) {
    const Bytes codes = load_halves(TableCodes::codes(block, part, step % 4) + slice * kSliceBytes, step >= 4);
    return look_up(load_table(block + kOwnFormat.table_at()), codes);
  }
};
#else
// Plain loops over the lanes: the compiler's own vectors.
struct Sums {
  int32_t of[kLanesPerSlice];
};

struct LoopedCodes {
  using Sum = Sums;
  struct Codes {
    int8_t of[kSliceBytes];
  };
  static void add(Sum& sum, const Codes& codes, const int8_t* x) {
    for (int i = 0; i < kLanesPerSlice; ++i) {
      for (int k = 0; k < 4; ++k) sum.of[i] += codes.of[4 * i + k] * x[k];
    }
  }
  static FourNumbers four_numbers(const Codes& codes) {
    FourNumbers numbers;
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < kLanesPerSlice; ++i) numbers.of[k][i] = static_cast<float>(codes.of[4 * i + k]);
    }
    return numbers;
  }
  static Vector total(const Sum& sum, int32_t offset) {
    Vector v;
    for (int i = 0; i < kLanesPerSlice; ++i) v[i] = static_cast<float>(sum.of[i] + offset);
    return v;
  }
  static Codes load_halves(const uint8_t* both, bool high) {
    Codes codes;
    for (int i = 0; i < kSliceBytes; ++i) codes.of[i] = static_cast<int8_t>(both[i] >> (high ? 4 : 0) & 15);
    return codes;
  }
};

template <const BlockFormat& kOwnFormat>
struct Codes8 : CodesBase<kOwnFormat>, LoopedCodes {
  static Codes load(const uint8_t* block, int part, int step, int slice) {
    Codes codes;
    std::memcpy(codes.of, Codes8::codes(block, part, step) + slice * kSliceBytes, sizeof(codes));
    return codes;
  }
  static FourNumbers numbers(const uint8_t* block, int part, int step, int slice) {
    return four_numbers(load(block, part, step, slice));
  }
  static Vector total(const Sum& sum, int32_t) { return LoopedCodes::total(sum, 0); }
};

template <const BlockFormat& kOwnFormat>
struct Codes4 : CodesBase<kOwnFormat>, LoopedCodes {
  static Codes load(const uint8_t* block, int part, int step, int slice) {
    return load_halves(Codes4::codes(block, part, step % 4) + slice * kSliceBytes, step >= 4);
  }
  static FourNumbers numbers(const uint8_t* block, int part, int step, int slice) {
    return four_numbers(load(block, part, step, slice));
  }
  static Vector total(const Sum& sum, int32_t code_sum) {
    return LoopedCodes::total(sum, -kOwnFormat.fixed_zero * code_sum);
  }
};

template <const BlockFormat& kOwnFormat>
struct TableCodes : CodesBase<kOwnFormat>, LoopedCodes {
  static Codes load(const uint8_t* block, int part, int step, int slice) {
    Codes codes = load_halves(TableCodes::codes(block, part, step % 4) + slice * kSliceBytes, step >= 4);
    for (int8_t& code : codes.of) code = static_cast<int8_t>(block[kOwnFormat.table_at() + code]);
    return codes;
  }
  static FourNumbers numbers(const uint8_t* block, int part, int step, int slice) {
    return four_numbers(load(block, part, step, slice));
  }
  static Vector total(const Sum& sum, int32_t) { return LoopedCodes::total(sum, 0); }
};
#endif

}  // namespace specengine::SPECENGINE_ISA
