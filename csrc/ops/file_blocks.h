// Blocks of GGUF files whose values the kernels do not read as they are: unpacked to floats, or quantised again.
#pragma once
#include "ops/packed_weight.h"

namespace specengine {

enum class BlockType { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };

struct FileBlock {
  const char* name;
  BlockType type;
  int64_t columns, bytes;
};
inline constexpr FileBlock kFileBlocks[] = {
    {"Q8_0", BlockType::kQ8_0, 32, 34},   {"Q4_0", BlockType::kQ4_0, 32, 18},   {"Q4_1", BlockType::kQ4_1, 32, 20},
    {"Q5_0", BlockType::kQ5_0, 32, 22},   {"Q5_1", BlockType::kQ5_1, 32, 24},   {"Q4_K", BlockType::kQ4_K, 256, 144},
    {"Q5_K", BlockType::kQ5_K, 256, 176}, {"Q6_K", BlockType::kQ6_K, 256, 210},
};

inline const FileBlock& file_block(const std::string& type) {
  std::string known;
  for (const FileBlock& block : kFileBlocks) {
    if (type == block.name) return block;
    const bool last = &block == std::end(kFileBlocks) - 1;
    known += (known.empty() ? "" : last ? " or " : ", ") + std::string(block.name);
  }
  fail("type: expected one of ", known, ", got '", type, "'");
}

// Checks rows of a file, uint8 [R, row_bytes], and returns their number of columns.
inline int64_t check_file_rows(Checker& check, const TensorView& rows, Dim& R, const std::string& type) {
  const FileBlock& from = file_block(type);
  Dim row_bytes{"row_bytes"};
  check(rows, "rows", {DType::kUInt8}, {R, row_bytes});
  if (row_bytes % from.bytes != 0) fail("rows: ", row_bytes.value, " bytes are no whole number of ", type, " blocks");
  return row_bytes / from.bytes * from.columns;
}

// values[R, C] = the values of rows of a file, with the gguf package's roundings.
struct UnpackBlocks {
  TensorView rows;    // [R, row_bytes] uint8
  TensorView values;  // [R, C] float32, written
  std::string type;   // a name of kFileBlocks

  Device validate() const {
    Checker check;
    Dim R{"R"}, C{"C"};
    C.value = check_file_rows(check, rows, R, type), C.bound_by = "rows";
    check(values, "values", {DType::kFloat32}, {R, C});
    return check.device();
  }
};

// As PackLinear, from rows of a file in place of their values as float32.
struct RequantiseBlocks {
  TensorView rows;    // [R, row_bytes] uint8
  TensorView packed;  // q8 or q4_min, written
  int64_t first;
  std::string type;  // a name of kFileBlocks

  Device validate() const {
    Checker check;
    Dim R{"R"}, C{"C"}, P{"P"};
    C.value = check_file_rows(check, rows, R, type);
    Dim blocks{"C/32", blocks_of(C), "rows"}, bytes{"bytes"};
    check(packed, "packed", {DType::kUInt8}, {P, blocks, bytes});
    if (bytes != kQ8.bytes() && bytes != kQ4Min.bytes()) {
      fail("packed: values are quantised to blocks of ", kQ8.bytes(), " or ", kQ4Min.bytes(), " bytes, got ",
           bytes.value);
    }
    check_rows_fit(first, R, P);
    return check.device();
  }
};

SPECENGINE_CPU_OP(UnpackBlocks)
SPECENGINE_CPU_OP(RequantiseBlocks)

}  // namespace specengine
