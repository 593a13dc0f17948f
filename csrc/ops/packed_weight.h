// The packed form of weights, which the linear layers read: panels of 16 output columns (rows of the weight [N, C]).
//
// The way of a 4-bit weight: models/checkpoint_gguf.py reads a file's blocks -> PackBlocks (cpu/pack_weight.cpp) lays
// out codes and scales as below. Linear layers: cpu/dot_codes.h multiplies codes, cpu/linear.cpp applies the scales.
// Embeddings: BlockColumn::value (cpu/block_column.h) makes one float per code.
//
//   float32 | float16 | bfloat16: [P, C, 16]
//   quantised: uint8 [P, blocks, bytes], a block being 32 input columns of a panel; its size names the format:
//     kQ8Bytes    codes -128..127, then 16 float16 scales:           weight = scale * code
//     kQ4Bytes    codes 0..15, then 16 float16 scales:               weight = scale * (code - 8)
//     kQ4MinBytes codes 0..15, 16 float16 scales, 16 float16 minima: weight = scale * code + minimum
// Codes lie as [column / 4][16][column % 4], so that one load holds four columns of every output. A byte of the 4-bit
// formats holds column c in its low half and column c + 16 in its high half. C is padded to whole blocks; the rows of x
// are padded with zeros.
// CUDA reads floats as they are: float32 | float16 | bfloat16 [N, C], row-major, rows of whole 16-byte pieces.
#pragma once
#include <string>

#include "base/check.h"
#include "base/isa.h"

namespace specengine {

constexpr int64_t kPanel = 16;
constexpr int64_t kBlock = 32;
constexpr int64_t kQ8Bytes = kPanel * kBlock + 2 * kPanel;
constexpr int64_t kQ4Bytes = kPanel * kBlock / 2 + 2 * kPanel;
constexpr int64_t kQ4MinBytes = kPanel * kBlock / 2 + 4 * kPanel;

inline int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

// Checks a packed weight of any format; C and P bind as in every check.
inline void check_weight(Checker& check, const TensorView& weight, const char* name, Dim& P, Dim& C) {
  if (weight.dtype != DType::kUInt8) {
    return check(weight, name, {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUInt8}, {P, C, kPanel});
  }
  Dim blocks{"C/32"}, bytes{"bytes"};
  if (C.value >= 0) blocks.value = blocks_of(C), blocks.bound_by = C.bound_by;
  check(weight, name, {DType::kUInt8}, {P, blocks, bytes});
  if (bytes != kQ8Bytes && bytes != kQ4Bytes && bytes != kQ4MinBytes) {
    fail(name, ": blocks of ", bytes.value, " bytes are of no known format, expected ", kQ8Bytes, ", ", kQ4Bytes,
         " or ", kQ4MinBytes);
  }
}

// Checks a weight as CUDA reads it.
inline void check_row_major(Checker& check, const TensorView& weight, const char* name, Dim& N, Dim& C) {
  constexpr int64_t kMostColumns = 1 << 24;
  check(weight, name, {DType::kFloat32, DType::kFloat16, DType::kBFloat16}, {N, C});
  if (C % 8 != 0 || C > kMostColumns) {
    fail(name, ": expected a multiple of 8 columns, at most ", kMostColumns, ", got ", C.value);
  }
  check_aligned(weight, name);
}

inline void check_rows_fit(int64_t first, int64_t rows, int64_t panels) {
  if (first < 0 || first > panels * kPanel - rows) {
    fail("first: ", rows, " rows from ", first, " on do not fit in ", panels * kPanel, " packed rows");
  }
}

// Host-readable tensors only.
inline void check_ids(const TensorView& ids, const char* name, int64_t rows) {
  for (int64_t m = 0; m < ids.shape[0]; ++m) {
    const int32_t id = ids.as<int32_t>()[m];
    if (id < 0 || id >= rows) fail(name, ": entry ", m, " is ", id, ", expected 0 to ", rows - 1);
  }
}

// Writes rows [first, first + R) of a weight into its packed form; rows past N in the last panel stay as they are.
// kQ8Bytes rounds to the nearest code of absmax / 127; kQ4MinBytes spans minimum to maximum. A row's block with an
// entry that is not finite, or too large for a float16 scale, becomes NaN.
struct PackLinear {
  TensorView rows;    // [R, C] float32 | bfloat16 | float16
  TensorView packed;  // any format but kQ4Bytes, written
  int64_t first;

  Device validate() const {
    Checker check;
    Dim R{"R"}, C{"C"}, P{"P"};
    check(rows, "rows", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {R, C});
    check_weight(check, packed, "packed", P, C);
    if (packed.dtype == DType::kUInt8 && packed.shape[2] == kQ4Bytes) {
      fail("packed: floats are quantised to blocks of ", kQ8Bytes, " or ", kQ4MinBytes, " bytes, got ", kQ4Bytes);
    }
    check_rows_fit(first, R, P);
    return check.device();
  }
};

// The same from blocks of a GGUF file, with their codes and scales: Q8_0 to kQ8Bytes, Q4_0 to kQ4Bytes, Q4_1 and
// Q4_K to kQ4MinBytes (the products of Q4_K's two scales are rounded to float16).
struct PackBlocks {
  TensorView rows;    // [R, row_bytes] uint8
  TensorView packed;  // the format of `type`, written
  int64_t first;
  std::string type;  // "Q8_0" | "Q4_0" | "Q4_1" | "Q4_K"

  struct Layout {
    const char* name;
    int64_t columns, bytes;  // of one block of the file
    int64_t packed_bytes;    // of one block of the packed weight
  };
  static constexpr Layout kLayouts[] = {{"Q8_0", 32, 34, kQ8Bytes},
                                        {"Q4_0", 32, 18, kQ4Bytes},
                                        {"Q4_1", 32, 20, kQ4MinBytes},
                                        {"Q4_K", 256, 144, kQ4MinBytes}};

  const Layout& layout() const {
    for (const Layout& layout : kLayouts) {
      if (type == layout.name) return layout;
    }
    fail("type: expected Q8_0, Q4_0, Q4_1 or Q4_K, got '", type, "'");
  }

  Device validate() const {
    Checker check;
    Dim R{"R"}, row_bytes{"row_bytes"}, P{"P"}, C{"C"};
    const Layout& from = layout();
    check(rows, "rows", {DType::kUInt8}, {R, row_bytes});
    if (row_bytes % from.bytes != 0) fail("rows: ", row_bytes.value, " bytes are no whole number of ", type, " blocks");
    C.value = row_bytes / from.bytes * from.columns, C.bound_by = "rows";
    check(packed, "packed", {DType::kUInt8}, {P, blocks_of(C), from.packed_bytes});
    check_rows_fit(first, R, P);
    return check.device();
  }
};

// out[M, C] = rows `ids` of a weight: the embedding lookup on packed weights, so that a tied head is stored once.
struct GatherRows {
  TensorView weight;  // any format; on CUDA [N, C] as it is
  TensorView ids;     // [M] int32; on CUDA an id that is no row of the weight (-1 for padding) gives zeros
  TensorView out;     // [M, C] float32, written

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"}, N{"N"}, P{"P"};
    check(out, "out", {DType::kFloat32}, {M, C});
    for_cuda(weight.device) ? check_row_major(check, weight, "weight", N, C)
                            : check_weight(check, weight, "weight", P, C);
    check(ids, "ids", {DType::kInt32}, {M});
    return check.device();
  }
};

SPECENGINE_CPU_OP(PackLinear)
SPECENGINE_CPU_OP(PackBlocks)
SPECENGINE_CPU_OP(GatherRows)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const GatherRows&);
#endif

}  // namespace specengine
