// Weights that stay in codes on CUDA (specengine/ops/coded/rows.py). A value is (number - zero) * scale, or
// number * scale + minimum, in float32.
//
// The packed form is uint8 [P, chunks, bytes]: panels of 16 rows, chunks of 128 columns of a panel. A chunk has
//   codes   [half of the panel][piece][lane][16 bytes]: lane l has row l / 4 of the half, and of every 32 columns the 8
//           from 8 * (l % 4) on. 4-bit codes have one piece, the earlier column of a byte in its low half; 8-bit codes
//           have two, of 64 columns each
//   scales  [128 / group][16]     minima  likewise, if any     zeros  uint8 [128 / group][16], if any
// and is a whole number of 16-byte pieces. Rows past N, columns past C and their scales are 0.
#pragma once
#include <string>

#include "base/check.h"
#include "base/host_device.h"

namespace specengine {

constexpr int kCodedRows = 16;      // of a panel
constexpr int kCodedColumns = 128;  // of a chunk

enum class CodedKind : uint8_t { kInt4, kInt8, kE4m3, kE2m1 };
enum class CodedScales : uint8_t { kFloat32, kFloat16, kBFloat16 };
enum class CodedOffset : uint8_t { kNone, kMiddle, kZeros, kMinima };

SPECENGINE_HOST_DEVICE constexpr bool is_integer(CodedKind kind) {
  return kind == CodedKind::kInt4 || kind == CodedKind::kInt8;
}
SPECENGINE_HOST_DEVICE constexpr int bits_of(CodedKind kind) {
  return kind == CodedKind::kInt4 || kind == CodedKind::kE2m1 ? 4 : 8;
}

// A chunk as the kernels read it: places are bytes from its begin on.
struct CodedChunk {
  CodedKind kind;
  CodedScales scales;
  CodedOffset offset;
  int group_bits;  // log2 of the columns that share a scale
  int scales_at, minima_at, zeros_at, bytes;
};

// How a weight is coded, by name.
struct CodedForm {
  static constexpr char kRecord[] = "CodedForm";
  std::string kind;    // "int4" | "int8" | "e4m3" | "e2m1"
  int64_t group;       // columns that share a scale: 16 | 32 | 64 | 128
  std::string scales;  // their type: "float32" | "float16" | "bfloat16"
  std::string offset;  // "none" | "middle" | "zeros" | "minima"; "middle" subtracts half of the codes' range

  template <size_t kCount>
  static int place_of(const std::string& value, const char* name, const char* const (&names)[kCount]) {
    std::string expected;
    for (size_t i = 0; i < kCount; ++i) {
      if (value == names[i]) return static_cast<int>(i);
      expected += (i == 0 ? "" : i + 1 < kCount ? ", " : " or ") + std::string(names[i]);
    }
    fail("form: expected ", name, " ", expected, ", got '", value, "'");
  }

  CodedChunk chunk() const {
    CodedChunk chunk{};
    chunk.kind = static_cast<CodedKind>(place_of(kind, "kind", {"int4", "int8", "e4m3", "e2m1"}));
    chunk.scales = static_cast<CodedScales>(place_of(scales, "scales", {"float32", "float16", "bfloat16"}));
    chunk.offset = static_cast<CodedOffset>(place_of(offset, "offset", {"none", "middle", "zeros", "minima"}));
    if (group != 16 && group != 32 && group != 64 && group != 128) {
      fail("form: expected a group of 16, 32, 64 or 128 columns, got ", group);
    }
    const bool minima = chunk.offset == CodedOffset::kMinima;
    if (minima ? chunk.kind != CodedKind::kInt4 : chunk.offset != CodedOffset::kNone && !is_integer(chunk.kind)) {
      fail("form: ", kind, " has no ", offset);
    }
    while (1 << chunk.group_bits < group) ++chunk.group_bits;
    const int groups = kCodedRows * (kCodedColumns >> chunk.group_bits);
    const int scale_bytes = groups * (chunk.scales == CodedScales::kFloat32 ? 4 : 2);
    chunk.scales_at = kCodedRows * kCodedColumns * bits_of(chunk.kind) / 8;
    chunk.minima_at = chunk.scales_at + scale_bytes;
    chunk.zeros_at = chunk.minima_at + (minima ? scale_bytes : 0);
    chunk.bytes = chunk.zeros_at + (chunk.offset == CodedOffset::kZeros ? groups : 0);
    return chunk;
  }
};

// Checks a coded weight of C columns, which are bound, and returns its rows at most.
inline int64_t check_coded(Checker& check, const TensorView& weight, const CodedForm& form, const Dim& C) {
  constexpr int64_t kMostColumns = 1 << 24;
  if (C % 8 != 0 || C > kMostColumns) {
    fail(C.bound_by, ": expected a multiple of 8 columns, at most ", kMostColumns, ", got ", C.value);
  }
  Dim P{"P"}, chunks{"C/128", (C + kCodedColumns - 1) / kCodedColumns, C.bound_by};
  check(weight, "weight", {DType::kUInt8}, {P, chunks, form.chunk().bytes});
  check_aligned(weight, "weight");
  return P * kCodedRows;
}

}  // namespace specengine
