// A mixture of experts (MoE): a router sends each row to k of E experts, each a gated MLP, and their outputs are added.
//
// A pair is a row with one of its k slots. Pairs are grouped by expert, so that a pass reads each expert's weights
// once. Every sum has one order that does not know the group's size, and slots are added in their order: a row's bits
// never depend on the rows beside it.
//
// RouteRows -> GroupPairs -> ExpertLinear (gate and up) -> SiluMul -> ExpertLinear (down) -> CombineExperts.
#pragma once
#include <algorithm>

#include "base/check.h"
#include "base/isa.h"
#include "ops/linear.h"

namespace specengine {

constexpr int64_t kRouterLanes = 32;  // chains of a router's sum: columns c, c + 32, ..; a CUDA warp has one in a lane
constexpr int64_t kMostExperts = 1024;
constexpr int64_t kMostPerToken = 32;

// The k experts of the largest logits, each row's in falling order, ties to the lower expert, with their weights. A
// logit is 32 chains of fused multiply-adds, added in pairs (i, i + 16), (i, i + 8), .., then the bias.
struct RouteRows {
  TensorView x;                 // [M, C] float32
  TensorView router;            // [E, C] float32 | bfloat16 | float16
  OptionalTensor bias;          // [E] float32
  OptionalTensor shared_gate;   // [C] float32: the sigmoid of its product with x scales the shared expert
  TensorView logits;            // [M, E] float32, written
  TensorView experts;           // [M, k] int32, written
  TensorView weights;           // [M, k] float32, written
  OptionalTensor shared_scale;  // [M] float32, written; given with shared_gate
  bool renormalise;  // weights are a softmax over the k logits; otherwise over all E, and they need not sum to 1

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"}, E{"E"}, k{"k"};
    check(x, "x", {DType::kFloat32}, {M, C});
    check(router, "router", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {E, C});
    check.optional(bias, "bias", {DType::kFloat32}, {E});
    check.optional(shared_gate, "shared_gate", {DType::kFloat32}, {C});
    check(logits, "logits", {DType::kFloat32}, {M, E});
    check(experts, "experts", {DType::kInt32}, {M, k});
    check(weights, "weights", {DType::kFloat32}, {M, k});
    if (shared_gate.given() && !shared_scale.given()) fail("shared_scale: expected a tensor, got None");
    if (shared_scale.given() && !shared_gate.given()) fail("shared_gate: expected a tensor, got None");
    check.optional(shared_scale, "shared_scale", {DType::kFloat32}, {M});
    if (E < 1 || E > kMostExperts) fail("router: expected 1 to ", kMostExperts, " experts, got ", E.value);
    if (k < 1 || k > kMostPerToken || k > E) {
      fail("experts: expected 1 to ", std::min<int64_t>(kMostPerToken, E), " for each row, got ", k.value);
    }
    return check.device();
  }
};

// Sorts the pairs by expert, those of one expert by row.
struct GroupPairs {
  TensorView experts;  // [M, k] int32
  TensorView starts;   // [E + 1] int32, written: expert e has the places from starts[e] to starts[e + 1]
  TensorView rows;     // [M * k] int32, written: the row of each place
  TensorView places;   // [M, k] int32, written: the place of each pair

  Device validate() const {
    Checker check;
    Dim M{"M"}, k{"k"}, ends{"E+1"};
    check(experts, "experts", {DType::kInt32}, {M, k});
    check(starts, "starts", {DType::kInt32}, {ends});
    check(rows, "rows", {DType::kInt32}, {M * k});
    check(places, "places", {DType::kInt32}, {M, k});
    if (ends < 2) fail("starts: expected E + 1 entries, got ", ends.value);
    return check.device();
  }
  int64_t num_experts() const { return starts.shape[0] - 1; }
};

// Checks what a product of M rows by experts reads and writes beside the weight. Of each expert it writes `columns`
// columns from `first` on.
inline void check_places(Checker& check, const OptionalTensor& rows, const OptionalTensor& bias, const TensorView& out,
                         int64_t experts, int64_t first, int64_t columns, const Dim& M) {
  Dim P{"P"}, N{"N"};
  check(out, "out", {DType::kFloat32}, {P, N});
  if (!rows.given() && P != M) fail("out: expected x's ", M.value, " rows where no rows are given, got ", P.value);
  check.optional(rows, "rows", {DType::kInt32}, {P});
  check.optional(bias, "bias", {DType::kFloat32}, {experts, N});
  if (first < 0 || first > N - columns) {
    fail("first: ", columns, " columns from ", first, " on are not in out's N=", N.value);
  }
}

// Each place's row times its expert's weight. Experts lie one after the other in the weight, and each begins a panel.
struct ExpertLinear {
  TensorView x;         // [M, ..], see check_product
  OptionalTensor rows;  // [P] int32: the row of x of each place; None: x has the places' order
  TensorView weight;    // E experts of ceil(columns / 16) panels each, packed; on CUDA [rows of all panels, C]
  OptionalTensor bias;  // [E, N] float32
  TensorView starts;    // [E + 1] int32, see GroupPairs
  TensorView out;       // [P, N] float32; columns [first, first + columns) are written
  int64_t first;
  int64_t columns;  // of one expert in this weight

  int64_t panels() const { return blocks_of(columns, kPanel); }  // of one expert

  Device validate() const {
    Checker check;
    Dim M{"M"}, ends{"E+1"};
    check(starts, "starts", {DType::kInt32}, {ends});
    const int64_t experts = ends - 1;
    if (columns < 1) fail("columns: expected at least 1, got ", columns);
    check_product(check, x, weight, experts * panels() * kPanel, 0, M);
    check_places(check, rows, bias, out, experts, first, columns, M);
    return check.device();
  }
  // Host-readable tensors only.
  void check_values() const {
    const int32_t* start = starts.as<int32_t>();
    const int64_t experts = starts.shape[0] - 1, places = out.shape[0];
    if (start[0] != 0 || start[experts] != places || !std::is_sorted(start, start + experts + 1)) {
      fail("starts: expected rising numbers from 0 to ", places);
    }
    if (rows.defined()) check_ids(rows, "rows", x.shape[0]);
  }
};

// out[m] = the sum over slots of weights[m, s] * y[places[m, s]], then + shared_scale[m] * shared[m].
struct CombineExperts {
  TensorView y;                 // [P, C] float32
  TensorView places;            // [M, k] int32
  TensorView weights;           // [M, k] float32
  OptionalTensor shared;        // [M, C] float32: the shared expert's output
  OptionalTensor shared_scale;  // [M] float32; None: 1
  TensorView out;               // [M, C] float32, written; may be shared

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"}, P{"P"}, k{"k"};
    check(y, "y", {DType::kFloat32}, {P, C});
    check(places, "places", {DType::kInt32}, {M, k});
    check(weights, "weights", {DType::kFloat32}, {M, k});
    check.optional(shared, "shared", {DType::kFloat32}, {M, C});
    check.optional(shared_scale, "shared_scale", {DType::kFloat32}, {M});
    check(out, "out", {DType::kFloat32}, {M, C});
    if (shared_scale.given() && !shared.given()) fail("shared: expected a tensor, got None");
    if (P != M * k) fail("y: expected M * k=", M * k, " places, got ", P.value);
    return check.device();
  }
};

SPECENGINE_CPU_OP(RouteRows)
SPECENGINE_CPU_OP(GroupPairs)
SPECENGINE_WIDE_CPU_OP(ExpertLinear)
SPECENGINE_CPU_OP(CombineExperts)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const RouteRows&);
void run_cuda(const GroupPairs&);
void run_cuda(const ExpertLinear&);
void run_cuda(const CombineExperts&);
#endif

}  // namespace specengine
