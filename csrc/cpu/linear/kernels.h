// The kernels of linear layers: each multiplies a tile of rows of x by one panel of a weight.
//
// Every sum is one chain of fused multiply-adds in the order of C, for any number of rows, so a row's result never
// depends on the rows beside it. For codes the chain is over the groups of columns that share a scale, at most 32,
// whose integer sums are exact; for e4m3 it is over blocks of 128 columns, whose sums are such chains.
#pragma once
#include "cpu/linear/dot_codes.h"
#include "cpu/simd.h"
#include "ops/linear.h"

namespace specengine::SPECENGINE_ISA {

// Bytes by which the prefetch runs ahead of the multiplication. The hardware's own prefetch runs dry when several rows
// share a weight: without this, 8 rows cost 1.5 times as much.
constexpr int64_t kAhead = 6144;

// A kernel is a struct with kRows, the most rows of its tiles, and run<R>, which multiplies R rows from `rows` on by
// one panel. `row_size` is x.shape[1]: floats, or blocks of codes.

// Rows of the largest tile: as many as have their sums in registers. On x86 the portable set serves only machines
// without AVX2, so its tiles have one row: six took about ten times as long to compile.
#if defined(SPECENGINE_HAVE_X86) && !defined(__AVX2__)
constexpr int kFloatRows = 1, kCodedRows = 1;
#elif defined(__AVX512VNNI__)
constexpr int kFloatRows = 12, kCodedRows = 12;
#elif defined(__AVX512F__)
constexpr int kFloatRows = 12, kCodedRows = 6;  // sums and as many dot products; more gain nothing without VNNI
#else
constexpr int kFloatRows = 6, kCodedRows = 6;  // 12 sums, 2 weights, 1 broadcast: all 16 vector registers of AVX2
#endif

template <typename Weight>
struct FloatKernel {
  static constexpr int kRows = kFloatRows;

  template <int R>
  static void run(const uint8_t* rows, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    const float* x = reinterpret_cast<const float*>(rows);
    const Weight* weight = reinterpret_cast<const Weight*>(panel);
    f32x16 sum[R] = {};
    for (int64_t c = 0; c < row_size; ++c) {
      __builtin_prefetch(weight + c * kPanel + kAhead / sizeof(Weight));
      const f32x16 w = load16(weight + c * kPanel);
      for (int r = 0; r < R; ++r) sum[r] = fmadd(splat16(x[r * row_size + c]), w, sum[r]);
    }
    for (int r = 0; r < R; ++r) store16(out[r], sum[r]);
  }
};

inline int32_t sum_of(const int8_t* codes, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += codes[i];
  return sum;
}

template <typename Codes>
struct CodedKernel {
  static constexpr int kRows = kCodedRows;

  template <int R>
  static void run(const uint8_t* rows, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    const RowBlock* x = reinterpret_cast<const RowBlock*>(rows);
    constexpr const BlockFormat& kFormat = Codes::kFormat;
    constexpr int kParts = static_cast<int>(kFormat.parts()), kGroups = kFormat.group < kBlock ? 2 : 1;  // of a part
    constexpr int64_t kPartBytes = kFormat.bytes() / kParts;
    // Slice by slice: the sums of one leave registers for more rows, and the panel is near when it is walked again.
    for (int slice = 0; slice < kSlices; ++slice) {
      Vector sum[R] = {};
      for (int64_t b = 0; b < row_size; ++b) {
        const uint8_t* block = panel + b / kParts * kFormat.bytes();
        const int part = static_cast<int>(b % kParts);
        if (slice == 0) {
          for (int64_t line = 0; line < kPartBytes; line += 64) {
            __builtin_prefetch(panel + b * kPartBytes + kAhead + line);
          }
        }
        for (int group = 0; group < kGroups; ++group) {
          constexpr int kSteps = kBlock / 4 / kGroups;
          typename Codes::Sum dot[R] = {};
#pragma GCC unroll 8
          for (int step = group * kSteps; step < (group + 1) * kSteps; ++step) {
            const auto codes = Codes::load(block, part, step, slice);
            for (int r = 0; r < R; ++r) {
              Codes::add(dot[r], codes, x[b + r * row_size].code + 4 * step);
              settle(dot[r]);
            }
          }
          const int64_t place = part * kBlock / kFormat.group + group;
          const Vector scale = Codes::scale(block, place, slice);
          int32_t code_sum[R];
          for (int r = 0; r < R; ++r) {
            const RowBlock& row = x[b + r * row_size];
            code_sum[r] = kGroups == 1 ? row.code_sum : sum_of(row.code + 4 * kSteps * group, 4 * kSteps);
            const Vector exact = Codes::total(dot[r], code_sum[r]);
            sum[r] = fmadd(exact, scale * splat_of<Vector>(row.scale), sum[r]);
          }
          if constexpr (Codes::kHasMinimum) {
            const Vector minimum = Codes::minimum(block, place, slice, scale);
            for (int r = 0; r < R; ++r) {
              const RowBlock& row = x[b + r * row_size];
              const float x_sum = kGroups == 1 ? row.sum : row.scale * static_cast<float>(code_sum[r]);
              sum[r] = fmadd(minimum, splat_of<Vector>(x_sum), sum[r]);
            }
          }
        }
      }
      for (int r = 0; r < R; ++r) store(out[r] + slice * kLanesPerSlice, sum[r]);
    }
  }
};

// The same codes multiply rows of floats: each becomes the float of BlockColumn::value, so a row has the bits that a
// float32 weight of these values gives it.
template <typename Codes>
struct DecodingKernel {
  static constexpr int kRows = kFloatRows;

  template <int R>
  static void run(const uint8_t* rows, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    const float* x = reinterpret_cast<const float*>(rows);
    constexpr const BlockFormat& kFormat = Codes::kFormat;
    for (int slice = 0; slice < kSlices; ++slice) {
      Vector sum[R] = {};
      for (int64_t c = 0; c < row_size; c += 4) {
        const uint8_t* block = panel + c / kFormat.columns * kFormat.bytes();
        const int64_t column = c % kFormat.columns, group = column / kFormat.group;
        const auto four =
            Codes::numbers(block, static_cast<int>(column / kBlock), static_cast<int>(column % kBlock / 4), slice);
        const Vector scale = Codes::scale(block, group, slice);
        for (int64_t k = 0; k < std::min<int64_t>(4, row_size - c); ++k) {
          const Vector w = Codes::value(four.of[k], block, group, slice, scale);
          for (int r = 0; r < R; ++r) sum[r] = fmadd(splat_of<Vector>(x[r * row_size + c + k]), w, sum[r]);
        }
      }
      for (int r = 0; r < R; ++r) store(out[r] + slice * kLanesPerSlice, sum[r]);
    }
  }
};

// Sixteen floats of e4m3, each 2^-8 of its value: their bits are those of a half with another exponent.
inline f32x16 load_small_e4m3(const uint8_t* p) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xFFFF, halves);
#else
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
#else
  half halves[kPanel];
  for (int i = 0; i < kPanel; ++i) halves[i].bits = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7);
  return load16(halves);
#endif
}

struct E4m3Kernel {
  static constexpr int kRows = kFloatRows;

  template <int R>
  static void run(const uint8_t* rows, int64_t row_size, const uint8_t* panel, float (*out)[kPanel]) {
    const float* x = reinterpret_cast<const float*>(rows);
    for (int r = 0; r < R; ++r) store16(out[r], f32x16{});
    for (int64_t first = 0; first < row_size; first += kE4m3.columns, panel += kE4m3.bytes()) {
      f32x16 sum[R] = {};
      const int64_t columns = std::min(kE4m3.columns, row_size - first);
      for (int64_t c = 0; c < columns; ++c) {
        __builtin_prefetch(panel + c * kPanel + kAhead);
        const f32x16 w = load_small_e4m3(panel + c * kPanel);
        for (int r = 0; r < R; ++r) sum[r] = fmadd(splat16(x[r * row_size + first + c]), w, sum[r]);
      }
      const auto* scales = reinterpret_cast<const float*>(panel + kE4m3.scales_at());
      const f32x16 scale = fmadd(load16(scales), splat16(256.0f), f32x16{});
      for (int r = 0; r < R; ++r) store16(out[r], fmadd(sum[r], scale, load16(out[r])));
    }
  }
};

}  // namespace specengine::SPECENGINE_ISA
