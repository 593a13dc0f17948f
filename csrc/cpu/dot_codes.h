// Here linear layers turn 4-bit or 8-bit weights into numbers: integer dot products of a quantised block with int8
// rows, then total() as float, which linear.cpp multiplies by the scales. A step multiplies the codes of a slice of the
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

// The layout that both kinds of codes share.
template <int64_t kBlockBytes, int64_t kCodeBytes>
struct CodesBase {
  static constexpr int64_t kBytes = kBlockBytes;
  static constexpr bool kHasMinimum = kBlockBytes - kCodeBytes == 4 * kPanel;
  static const half* scales(const uint8_t* block) { return reinterpret_cast<const half*>(block + kCodeBytes); }
};

#if defined(__AVX2__)
struct Codes8 : CodesBase<kQ8Bytes, kPanel * kBlock> {
  using Sum = Bytes;
#if defined(SPECENGINE_DOT_BYTES)
  // Unsigned codes are 128 too large; total() subtracts that again.
  static Bytes load(const uint8_t* block, int group, int slice) {
    return flip_signs(load_bytes(block + group * kStep + slice * kSliceBytes));
  }
  static void add(Sum& sum, Bytes codes, const int8_t* x) { sum = dot_bytes(sum, codes, splat_four(x)); }
  static Vector total(Sum sum, int32_t code_sum) { return to_float(add32(sum, splat32(-128 * code_sum))); }
#else
  struct Signed {
    Bytes size, sign;
  };
  static Signed load(const uint8_t* block, int group, int slice) {
    const Bytes codes = load_bytes(block + group * kStep + slice * kSliceBytes);
    return {magnitude(codes), codes};
  }
  // |code| <= 128 and |x| <= 127: a pair of products fits 16 bits.
  static void add(Sum& sum, const Signed& codes, const int8_t* x) {
    sum = add32(sum, pairs32(pairs16(codes.size, with_sign(splat_four(x), codes.sign))));
  }
  static Vector total(Sum sum, int32_t) { return to_float(sum); }
#endif
};

template <bool kMinimum>
struct Codes4 : CodesBase<kMinimum ? kQ4MinBytes : kQ4Bytes, kPanel * kBlock / 2> {
  using Sum = Bytes;
  static Bytes load(const uint8_t* block, int group, int slice) {
    const Bytes both = load_bytes(block + group % 4 * kStep + slice * kSliceBytes);
    return group < 4 ? low_halves(both) : high_halves(both);
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
    return to_float(kMinimum ? sum : add32(sum, splat32(-8 * code_sum)));
  }
};
#else
// Plain loops over the lanes: the compiler's own vectors.
struct Sums {
  int32_t of[kLanesPerSlice];
};
struct FourColumns {
  int8_t of[kSliceBytes];
};

inline void add_products(Sums& sum, const FourColumns& codes, const int8_t* x) {
  for (int i = 0; i < kLanesPerSlice; ++i) {
    for (int k = 0; k < 4; ++k) sum.of[i] += codes.of[4 * i + k] * x[k];
  }
}

inline Vector to_float(const Sums& sum, int32_t offset) {
  Vector v;
  for (int i = 0; i < kLanesPerSlice; ++i) v[i] = static_cast<float>(sum.of[i] + offset);
  return v;
}

struct Codes8 : CodesBase<kQ8Bytes, kPanel * kBlock> {
  using Sum = Sums;
  static FourColumns load(const uint8_t* block, int group, int slice) {
    FourColumns codes;
    std::memcpy(codes.of, block + group * kStep + slice * kSliceBytes, sizeof(codes));
    return codes;
  }
  static void add(Sum& sum, const FourColumns& codes, const int8_t* x) { add_products(sum, codes, x); }
  static Vector total(const Sum& sum, int32_t) { return to_float(sum, 0); }
};

template <bool kMinimum>
struct Codes4 : CodesBase<kMinimum ? kQ4MinBytes : kQ4Bytes, kPanel * kBlock / 2> {
  using Sum = Sums;
  static FourColumns load(const uint8_t* block, int group, int slice) {
    const uint8_t* both = block + group % 4 * kStep + slice * kSliceBytes;
    FourColumns codes;
    for (int i = 0; i < kSliceBytes; ++i) codes.of[i] = static_cast<int8_t>(both[i] >> (group < 4 ? 0 : 4) & 15);
    return codes;
  }
  static void add(Sum& sum, const FourColumns& codes, const int8_t* x) { add_products(sum, codes, x); }
  static Vector total(const Sum& sum, int32_t code_sum) { return to_float(sum, kMinimum ? 0 : -8 * code_sum); }
};
#endif

}  // namespace specengine::SPECENGINE_ISA
