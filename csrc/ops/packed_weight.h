// The packed form of weights, which the linear layers read: panels of 16 output columns (rows of the weight [N, C]).
//
// The way of a 4-bit weight: models/checkpoint_gguf.py reads a file's blocks -> PackBlocks (cpu/pack_weight.cpp) lays
// out codes and scales as below. Linear layers: cpu/linear/dot_codes.h multiplies codes, cpu/linear/kernels.h applies
// the scales. Embeddings: BlockColumn::value (cpu/block_column.h) makes one float per code. Other files' codes come by
// PackCoded.
//
//   float32 | float16 | bfloat16: [P, C, 16]
//   coded: uint8 [P, blocks, bytes], a block being 32 or 128 input columns of a panel; its size names the format, see
//   kBlockFormats. A block has the codes, then for each group of columns 16 scales, then likewise minima and zeros,
//   then a table.
// 4-bit and 8-bit codes lie in parts of 32 columns as [column / 4][16][column % 4], so that one load holds four columns
// of every output. A byte of the 4-bit formats holds column c in its low half and column c + 16 in its high half. Codes
// of e4m3 lie as [column][16]. C is padded to whole blocks; the rows of x are padded with zeros.
// CUDA reads floats as they are: float32 | float16 | bfloat16 [N, C], row-major, rows of whole 16-byte pieces.
#pragma once
#include <iterator>
#include <string>

#include "base/check.h"
#include "base/isa.h"

namespace specengine {

constexpr int64_t kPanel = 16;
constexpr int64_t kBlock = 32;  // columns that share a scale of x

// weight = scale * (number - zero) + minimum, where the format has a zero or a minimum. A code's number is itself;
// 8-bit codes are signed; table: entry `code` of the block's table of int8; e4m3: that float.
struct BlockFormat {
  const char* name;
  int bits;
  int64_t columns;     // of a block
  int64_t group;       // columns that share a scale
  int64_t scale_size;  // bytes: 2 for float16, 4 for float32
  bool minima = false;
  bool zeros = false;
  bool table = false;
  bool e4m3 = false;
  int fixed_zero = 0;

  constexpr int64_t parts() const { return columns / kBlock; }
  constexpr int64_t groups() const { return columns / group; }
  constexpr int64_t part_bytes() const { return kPanel * kBlock * bits / 8; }
  constexpr int64_t scales_at() const { return parts() * part_bytes(); }
  constexpr int64_t minima_at() const { return scales_at() + groups() * kPanel * scale_size; }
  constexpr int64_t zeros_at() const { return minima_at() + (minima ? groups() * kPanel * scale_size : 0); }
  constexpr int64_t table_at() const { return zeros_at() + (zeros ? groups() * kPanel : 0); }
  constexpr int64_t bytes() const { return table_at() + (table ? 16 : 0); }
  // Whether rows of x are quantised to int8 for it; e4m3 multiplies floats.
  constexpr bool quantises_rows() const { return !e4m3; }
};

// q8, q4, q4_min: as GGUF's Q8_0, Q4_0, Q4_1 and Q4_K.  int4, int8: AWQ, GPTQ and the like; zeros of int8 are stored
// less 128, as its codes are.  int4_min16: Q2_K.  table4: e2m1 as twice its numbers, IQ4_NL, Q3_K.
inline constexpr BlockFormat kQ8{.name = "q8", .bits = 8, .columns = 32, .group = 32, .scale_size = 2};
inline constexpr BlockFormat kQ4{.name = "q4", .bits = 4, .columns = 32, .group = 32, .scale_size = 2, .fixed_zero = 8};
inline constexpr BlockFormat kQ4Min{
    .name = "q4_min", .bits = 4, .columns = 32, .group = 32, .scale_size = 2, .minima = true};
inline constexpr BlockFormat kInt4By32{
    .name = "int4_32", .bits = 4, .columns = 32, .group = 32, .scale_size = 4, .zeros = true};
inline constexpr BlockFormat kInt4By128{
    .name = "int4_128", .bits = 4, .columns = 128, .group = 128, .scale_size = 4, .zeros = true};
inline constexpr BlockFormat kInt8By32{
    .name = "int8_32", .bits = 8, .columns = 32, .group = 32, .scale_size = 4, .zeros = true};
inline constexpr BlockFormat kInt8By128{
    .name = "int8_128", .bits = 8, .columns = 128, .group = 128, .scale_size = 4, .zeros = true};
inline constexpr BlockFormat kInt4Min16{
    .name = "int4_min16", .bits = 4, .columns = 32, .group = 16, .scale_size = 2, .minima = true};
inline constexpr BlockFormat kTable4By16{
    .name = "table4_16", .bits = 4, .columns = 128, .group = 16, .scale_size = 4, .table = true};
inline constexpr BlockFormat kTable4By32{
    .name = "table4_32", .bits = 4, .columns = 128, .group = 32, .scale_size = 4, .table = true};
inline constexpr BlockFormat kE4m3{
    .name = "e4m3", .bits = 8, .columns = 128, .group = 128, .scale_size = 4, .e4m3 = true};
inline constexpr const BlockFormat* kBlockFormats[] = {&kQ8,         &kQ4,         &kQ4Min,     &kInt4By32,
                                                       &kInt4By128,  &kInt8By32,   &kInt8By128, &kInt4Min16,
                                                       &kTable4By16, &kTable4By32, &kE4m3};

constexpr bool sizes_differ() {
  for (size_t i = 0; i < std::size(kBlockFormats); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (kBlockFormats[i]->bytes() == kBlockFormats[j]->bytes()) return false;
    }
  }
  return true;
}
static_assert(sizes_differ(), "the size of a block names its format");

// The format of blocks of this size, or null.
inline const BlockFormat* find_format(int64_t bytes) {
  for (const BlockFormat* format : kBlockFormats) {
    if (format->bytes() == bytes) return format;
  }
  return nullptr;
}

// Of a checked coded weight.
inline const BlockFormat& format_of(const TensorView& weight) { return *find_format(weight.shape[2]); }

// Whether a checked weight multiplies rows quantised to int8.
inline bool quantises_rows(const TensorView& weight) {
  return weight.dtype == DType::kUInt8 && format_of(weight).quantises_rows();
}

inline int64_t blocks_of(int64_t columns, int64_t block = kBlock) { return (columns + block - 1) / block; }

// Checks a packed weight of any format; C and P bind as in every check.
inline void check_weight(Checker& check, const TensorView& weight, const char* name, Dim& P, Dim& C) {
  if (weight.dtype != DType::kUInt8) {
    return check(weight, name, {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUInt8}, {P, C, kPanel});
  }
  Dim any{"blocks"}, bytes{"bytes"};
  check(weight, name, {DType::kUInt8}, {P, any, bytes});
  const BlockFormat* format = find_format(bytes);
  if (format == nullptr) {
    std::string known;
    for (const BlockFormat* each : kBlockFormats) known += (known.empty() ? "" : ", ") + std::to_string(each->bytes());
    fail(name, ": blocks of ", bytes.value, " bytes are of no known format, expected one of ", known);
  }
  if (C.value < 0) return;
  Dim blocks{format->columns == kBlock ? "C/32" : "C/128", blocks_of(C, format->columns), C.bound_by};
  check(weight, name, {DType::kUInt8}, {P, blocks, bytes});
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
  for (int64_t m = 0; m < ids.numel(); ++m) {
    const int32_t id = ids.as<int32_t>()[m];
    if (id < 0 || id >= rows) fail(name, ": entry ", m, " is ", id, ", expected 0 to ", rows - 1);
  }
}

// Writes rows [first, first + R) of a weight into its packed form; rows past N in the last panel stay as they are.
// q8 rounds to the nearest code of absmax / 127; q4_min spans minimum to maximum. A row's block with an entry that is
// not finite, or too large for a float16 scale, becomes NaN.
struct PackLinear {
  TensorView rows;    // [R, C] float32 | bfloat16 | float16
  TensorView packed;  // floats, q8 or q4_min, written
  int64_t first;

  Device validate() const {
    Checker check;
    Dim R{"R"}, C{"C"}, P{"P"};
    check(rows, "rows", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {R, C});
    check_weight(check, packed, "packed", P, C);
    if (packed.dtype == DType::kUInt8 && &format_of(packed) != &kQ8 && &format_of(packed) != &kQ4Min) {
      fail("packed: floats are quantised to blocks of ", kQ8.bytes(), " or ", kQ4Min.bytes(), " bytes, got ",
           packed.shape[2]);
    }
    check_rows_fit(first, R, P);
    return check.device();
  }
};

// The same from blocks of a GGUF file, with their codes and scales: Q8_0 to q8, Q4_0 to q4, Q4_1 and Q4_K to
// q4_min (the products of Q4_K's two scales are rounded to float16).
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
  static constexpr Layout kLayouts[] = {{"Q8_0", 32, 34, kQ8.bytes()},
                                        {"Q4_0", 32, 18, kQ4.bytes()},
                                        {"Q4_1", 32, 20, kQ4Min.bytes()},
                                        {"Q4_K", 256, 144, kQ4Min.bytes()}};

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

// The same from codes, one a byte, with the scales of their groups: weight = scale * (number - zero) + minimum.
struct PackCoded {
  TensorView codes;       // [R, C] uint8
  TensorView scales;      // [R, ceil(C / group)] float32
  OptionalTensor zeros;   // likewise, uint8; given if the format has zeros
  OptionalTensor minima;  // likewise, float32; given if the format has minima
  OptionalTensor table;   // [16] bytes of int8; given if the format has a table
  TensorView packed;      // a format from int4_32 on, written; its scales of 16 bits are rounded to float16
  int64_t first;
  int64_t group;  // columns that share a scale: a multiple of the format's own

  Device validate() const {
    Checker check;
    Dim R{"R"}, C{"C"}, P{"P"};
    check(codes, "codes", {DType::kUInt8}, {R, C});
    check_weight(check, packed, "packed", P, C);
    if (packed.dtype != DType::kUInt8) fail("packed: expected a coded weight, got ", name_of(packed.dtype));
    const BlockFormat& format = format_of(packed);
    if (&format == &kQ8 || &format == &kQ4 || &format == &kQ4Min) {
      fail("packed: ", format.name, " takes blocks of a file, expected int4_32 or a later format");
    }
    if (group < 1 || group % format.group != 0) {
      fail("group: expected a multiple of ", format.group, ", got ", group);
    }
    Dim G{"C/group", blocks_of(C, group), "codes"};
    check(scales, "scales", {DType::kFloat32}, {R, G});
    check_part(check, zeros, "zeros", DType::kUInt8, format.zeros, {R, G});
    check_part(check, minima, "minima", DType::kFloat32, format.minima, {R, G});
    check_part(check, table, "table", DType::kUInt8, format.table, {int64_t{16}});
    check_rows_fit(first, R, P);
    return check.device();
  }

 private:
  static void check_part(Checker& check, const OptionalTensor& part, const char* name, DType dtype, bool wanted,
                         std::initializer_list<DimRef> shape) {
    if (part.given() != wanted)
      fail(name, wanted ? ": expected a tensor, got None" : ": expected None for this format");
    check.optional(part, name, {dtype}, shape);
  }
};

// out[M, C] = rows `ids` of a weight: the embedding lookup on packed weights, so that a tied head is stored once.
struct GatherRows {
  TensorView weight;  // any format; on CUDA [N, C] as it is
  TensorView ids;     // [M] int32; on CUDA also int64, and an id that is no row of the weight (-1: padding) gives zeros
  TensorView out;     // [M, C] float32, written; on CUDA also bfloat16 or float16

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"}, N{"N"}, P{"P"};
    for_cuda(weight.device) ? check(out, "out", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, C})
                            : check(out, "out", {DType::kFloat32}, {M, C});
    for_cuda(weight.device) ? check_row_major(check, weight, "weight", N, C)
                            : check_weight(check, weight, "weight", P, C);
    for_cuda(weight.device) ? check(ids, "ids", {DType::kInt32, DType::kInt64}, {M})
                            : check(ids, "ids", {DType::kInt32}, {M});
    return check.device();
  }
};

SPECENGINE_CPU_OP(PackLinear)
SPECENGINE_CPU_OP(PackBlocks)
SPECENGINE_CPU_OP(PackCoded)
SPECENGINE_CPU_OP(GatherRows)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const GatherRows&);
#endif

}  // namespace specengine
