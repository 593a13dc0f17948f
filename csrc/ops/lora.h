// Low-rank adapters (LoRA) of linear layers, applied beside the weight: out[m] += scale * B (A x[m]), where adapters[b]
// names the adapter of the request b that row m belongs to. The weight itself stays as it is, so it may be quantised,
// and requests of different adapters share a pass.
//
// A row's bits depend on the row and its adapter alone. CPU: (A x) is summed in chunks of kLoraChunk columns, each four
// chains of multiply-adds; chains and chunks are added in order, then scaled; the products with B are one chain in the
// order of the ranks, and the sum is added to out once.
#pragma once
#include <vector>

#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"
#include "ops/packed_weight.h"

namespace specengine {

constexpr int64_t kLoraChunk = 256;     // columns: two threads share even a narrow layer's sum
constexpr int64_t kMostLoraRank = 512;  // sums of a few rows fit on a thread's stack

// One matrix [N, K] of a layer in all G adapters of an engine, padded with zeros to the largest rank R, a multiple of
// 16. Both devices read the same panels.
struct LoraModule {
  TensorView a;       // [G, R / 16, K, 16] float32 | bfloat16 | float16
  TensorView b;       // [G, ceil(N / 16), R, 16], dtype of a
  TensorView ranks;   // [G] int32; 0: the adapter leaves this matrix alone
  TensorView scales;  // [G] float32
  int64_t first;      // column of the projection's output where its rows begin
  int64_t rows;       // N

  int64_t adapters() const { return a.shape[0]; }
  int64_t rank() const { return a.shape[1] * kPanel; }
  int64_t columns() const { return a.shape[2]; }
  int64_t panels() const { return b.shape[1]; }
  int64_t chunks() const { return for_cuda(a.device) ? 1 : (columns() + kLoraChunk - 1) / kLoraChunk; }

  void validate() const {
    Checker check;
    validate(check);
  }
  void validate(Checker& check) const {
    Dim G{"G"}, panels_of_rank{"R/16"}, K{"K"};
    check(a, "a", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {G, panels_of_rank, K, kPanel});
    if (panels_of_rank < 1 || panels_of_rank > kMostLoraRank / kPanel) {
      fail("a: expected 1 to ", kMostLoraRank / kPanel, " panels of 16 ranks, got ", panels_of_rank.value);
    }
    if (rows < 1) fail("rows: expected a positive number, got ", rows);
    check(b, "b", {a.dtype}, {G, (rows - 1) / kPanel + 1, rank(), kPanel});
    check(ranks, "ranks", {DType::kInt32}, {G});
    check(scales, "scales", {DType::kFloat32}, {G});
    if (first < 0) fail("first: expected a column, got ", first);
    if (for_cuda(ranks.device)) return;
    for (int64_t g = 0; g < G; ++g) {
      const int32_t rank_of = ranks.as<int32_t>()[g];
      if (rank_of < 0 || rank_of > rank()) fail("ranks: entry ", g, " is ", rank_of, ", expected 0 to ", rank());
    }
  }
};

constexpr size_t kMostLoraModules = 4;  // the inputs of a gated delta rule; attention has three

// The adapted matrices of one projection; none where no adapter has any.
struct LoraProjection {
  std::vector<LoraModule> modules;

  void validate() const {
    if (modules.size() > kMostLoraModules)
      fail("modules: expected at most ", kMostLoraModules, ", got ", modules.size());
    for (const LoraModule& module : modules) {
      if (module.a.dtype != modules[0].a.dtype) fail("modules: differ in dtype");
      if (module.adapters() != modules[0].adapters()) fail("modules: differ in the number of adapters");
      if (module.columns() != modules[0].columns()) fail("modules: differ in columns");
    }
  }
  int64_t adapters() const { return modules.empty() ? 0 : modules[0].adapters(); }
  // Checks that the modules read rows of `columns` columns and write into `rows` columns.
  void check_place(const char* name, int64_t rows, int64_t columns) const {
    for (const LoraModule& module : modules) {
      if (module.columns() != columns) {
        fail(name, ": adapters read ", module.columns(), " columns, expected ", columns);
      }
      if (module.first > rows - module.rows) fail(name, ": adapters write past ", rows, " rows");
    }
  }
  int64_t workspace_floats(int64_t M) const {
    int64_t total = 0;
    for (const LoraModule& module : modules) total += module.chunks() * module.rank();
    return total * M;
  }
};

struct LoraLayer {
  LoraProjection qkv, attention_out, gate_up, down;
};

struct AddLora {
  TensorView x;  // [M, K] float32; on CUDA also bfloat16 | float16
  const LoraProjection* projection;
  TensorView row_start;  // [B + 1] int32: rows [row_start[b], row_start[b + 1]) belong to request b
  TensorView adapters;   // [B] int32, -1: none; its rows stay as they are
  TensorView out;        // [M, N] float32, added to
  TensorView workspace;  // [projection->workspace_floats(M)] float32

  Device validate() const {
    Checker check;
    Dim M{"M"}, K{"K"}, B{"B"}, N{"N"}, floats{"floats"};
    check(out, "out", {DType::kFloat32}, {M, N});
    if (check.for_cuda()) {
      check(x, "x", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, K});
    } else {
      check(x, "x", {DType::kFloat32}, {M, K});
    }
    check(adapters, "adapters", {DType::kInt32}, {B});
    check(row_start, "row_start", {DType::kInt32}, {B + 1});
    check(workspace, "workspace", {DType::kFloat32}, {floats});
    for (const LoraModule& module : projection->modules) {
      if (module.columns() != K) fail("x: ", K.value, " columns, the adapters read ", module.columns());
    }
    projection->check_place("out", N, K);
    for (const LoraModule& module : projection->modules) module.validate(check);  // of the same device
    const int64_t needed = projection->workspace_floats(M);
    if (floats < needed) fail("workspace: expected ", needed, " floats, got ", floats.value);
    return check.device();
  }

  // Host-readable tensors only.
  void check_values() const {
    const int64_t M = out.shape[0], B = adapters.shape[0];
    const int32_t* start = row_start.as<int32_t>();
    if (start[0] != 0 || start[B] != M) {
      fail("row_start: expected to run from 0 to ", M, ", got ", start[0], " to ", start[B]);
    }
    for (int64_t b = 0; b < B; ++b) {
      if (start[b + 1] < start[b]) fail("row_start: decreases at entry ", b + 1);
      check_adapter(adapters, b, projection->adapters());
    }
  }

  static void check_adapter(const TensorView& adapters, int64_t b, int64_t count) {
    const int32_t adapter = adapters.as<int32_t>()[b];
    if (adapter < -1 || adapter >= count) {
      fail("adapters: entry ", b, " is ", adapter, ", expected -1 to ", count - 1);
    }
  }
};

// AddLora in two halves, around the product of the same rows: A x runs beside the pieces of this thread's next op, and
// the second half adds B (A x) to its output. The op must live until then.
struct StartLora {
  const AddLora* op;
};
struct FinishLora {
  const AddLora* op;
};

SPECENGINE_WIDE_CPU_OP(AddLora)
SPECENGINE_WIDE_CPU_OP(StartLora)
SPECENGINE_WIDE_CPU_OP(FinishLora)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const AddLora&);
#endif

}  // namespace specengine
