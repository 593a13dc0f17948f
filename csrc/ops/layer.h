// The small row-wise ops of a decoder layer: RMSNorm with residual, SiLU gate, RoPE with cache write.
#pragma once
#include <algorithm>

#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"
#include "ops/linear.h"

namespace specengine {

// Rows for the linear layer that follows: on the CPU float32 [M, C], or quantised (RowBlock) if its weight is; on CUDA
// [M, C] in its weight's dtype.
inline void check_activation(Checker& check, const TensorView& out, Dim& M, const DimRef& columns) {
  if (check.for_cuda()) {
    return check(out, "out", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, columns});
  }
  const int64_t C = columns.dim ? columns.dim->value : columns.fixed;
  if (out.dtype == DType::kUInt8) return check(out, "out", {DType::kUInt8}, {M, blocks_of(C), kRowBlockBytes});
  check(out, "out", {DType::kFloat32, DType::kUInt8}, {M, columns});
}

// Checks kept [M, L, C], of whose L layers `place` is written.
inline void check_kept(Checker& check, const OptionalTensor& kept, int64_t place, Dim& M, Dim& C) {
  Dim L{"L"};
  check.optional(kept, "kept", {DType::kFloat32}, {M, L, C});
  if (kept.given() && (place < 0 || place >= L)) fail("place: expected 0 to ", L - 1, ", got ", place);
}

// residual += delta (if given); out = residual / sqrt(mean(residual^2) + eps) * weight, row by row.
struct RmsNorm {
  TensorView residual;   // [M, C] float32, written if delta is given
  OptionalTensor delta;  // [M, C] float32
  TensorView weight;     // [C] float32; or [P * C], of every P rows in turn
  TensorView out;        // [M, C], see check_activation; written
  float eps;
  OptionalTensor kept = {};  // [M, L, C] float32, whose layer `place` becomes the residual
  int64_t place = 0;

  int64_t weights() const { return weight.shape[0] / std::max<int64_t>(1, residual.shape[1]); }

  Device validate() const {
    Checker check;
    Dim M{"M"}, C{"C"}, W{"P * C"};
    check(residual, "residual", {DType::kFloat32}, {M, C});
    check.optional(delta, "delta", {DType::kFloat32}, {M, C});
    check(weight, "weight", {DType::kFloat32}, {W});
    if (W < C || W != weights() * C)
      fail("weight: expected shape [C=", C.value, "] or a multiple, got [", W.value, "]");
    check_activation(check, out, M, C);
    check_kept(check, kept, place, M, C);
    return check.device();
  }
};

// out = silu(gate) * up, with gate and up side by side in one row.
struct SiluMul {
  TensorView gate_up;  // [M, 2I] float32
  TensorView out;      // [M, I], see check_activation; written

  Device validate() const {
    Checker check;
    Dim M{"M"}, both{"2I"};
    check(gate_up, "gate_up", {DType::kFloat32}, {M, both});
    if (both % 2 != 0) fail("gate_up: expected an even number of columns, got ", both.value);
    check_activation(check, out, M, both / 2);
    return check.device();
  }
};

// out = (up + 1) * gate * sigmoid(alpha * gate) of gate <= limit and -limit <= up <= limit: the gate of gpt-oss.
struct ClampedSwiglu {
  TensorView gate_up;  // [M, 2I] float32, gate and up side by side in one row
  TensorView out;      // [M, I], see check_activation; written
  float limit;
  float alpha;

  Device validate() const {
    if (!(limit > 0)) fail("limit: expected a positive number, got ", limit);
    return SiluMul{gate_up, out}.validate();
  }
};

// Checks positions. Host-readable tensors only; after validate_rows.
inline void check_depths(const KvCacheView& cache, const TensorView& depths, int64_t positions) {
  const int32_t* row_start = cache.row_start.as<int32_t>();
  for (int64_t b = 0; b < cache.requests(); ++b) {
    const int64_t length = cache.lengths.as<int32_t>()[b];
    for (int64_t m = row_start[b]; m < row_start[b + 1]; ++m) {
      const int64_t depth = depths.as<int32_t>()[m];
      if (depth < 0 || depth > cache.first_node + m - row_start[b])
        fail("depths: row ", m, " is ", depth, ", expected 0 to its node index");
      if (length + depth >= positions) {
        fail("lengths: position ", length + depth, " is past the ", positions, " rows of cos");
      }
    }
  }
}

constexpr int64_t kMaxHeadDim = 256;  // of the CUDA kernels

// The weight of a norm of q or k: [D], a norm for each head (Qwen3), or [heads * D], one norm for all heads of a row
// (OLMoE).
inline void check_head_norm(Checker& check, const OptionalTensor& norm, const char* name, int64_t heads, int64_t dim) {
  const bool whole = norm.defined() && norm.ndim == 1 && norm.shape[0] == heads * dim;
  check.optional(norm, name, {DType::kFloat32}, {whole ? heads * dim : dim});
}

// Splits the rows of one fused projection, normalises q and k, rotates the first R components of q and k to the node's
// position (prefix length + depth), writes k and v to the node's cache slot (prefix length + node index).
// CUDA: a row of depth -1, or behind the last request's rows, is padding: its q becomes 0, the cache stays as it is.
struct RopeCache {
  TensorView qkv;         // [M, (H + 2K) * D] float32; or [M, (2H + 2K) * D], each head of q with its gate
  TensorView cos;         // [T, R/2] float32, T positions
  TensorView sin;         // [T, R/2] float32
  OptionalTensor q_norm;  // [D] or [H * D] float32, see check_head_norm
  OptionalTensor k_norm;  // [D] or [K * D] float32
  TensorView depths;      // [M] int32, root 0
  KvCacheView cache;      // one layer, written
  TensorView q;           // [M, H, D] float32, written
  float eps;
  int64_t first = 0;  // column at which k begins where H is 0: qkv may have more columns on both sides then

  // Whether each head of q is followed by a gate, which GateHeads reads.
  bool gated() const {
    return qkv.ndim == 2 && q.ndim == 3 && qkv.shape[1] == 2 * (q.shape[1] + cache.heads()) * cache.dim();
  }

  Device validate() const {
    Checker check;
    Dim M{"M"}, H{"H"}, T{"T"}, half{"R/2"};
    const Device device = cache.validate(check);
    check(q, "q", {DType::kFloat32}, {M, H, cache.dim()});
    const bool with_gates = gated();
    const int64_t needed = ((with_gates ? 2 * H : H) + 2 * cache.heads()) * cache.dim();
    Dim columns{"columns"};
    H == 0 ? check(qkv, "qkv", {DType::kFloat32}, {M, columns}) : check(qkv, "qkv", {DType::kFloat32}, {M, needed});
    if (first < 0 || first + needed > qkv.shape[1]) {
      fail("first: ", needed, " columns from ", first, " on do not fit into ", qkv.shape[1]);
    }
    check(cos, "cos", {DType::kFloat32}, {T, half});
    check(sin, "sin", {DType::kFloat32}, {T, half});
    const int64_t most = cache.dim() / 2;
    if (half < 1 || half > most) fail("cos: expected 1 to D/2=", most, " columns, got ", half.value);
    if (with_gates && q_norm.given() && q_norm.ndim == 1 && q_norm.shape[0] != cache.dim()) {
      fail("q_norm: expected a norm for each head beside gates");
    }
    check_head_norm(check, q_norm, "q_norm", H, cache.dim());
    check_head_norm(check, k_norm, "k_norm", cache.heads(), cache.dim());
    check(depths, "depths", {DType::kInt32}, {M});
    if (check.for_cuda() && cache.dim() > kMaxHeadDim) {
      fail("k_cache: head dim ", cache.dim(), ", at most ", kMaxHeadDim, " is supported on cuda");
    }
    return device;
  }
};

SPECENGINE_CPU_OP(RmsNorm)
SPECENGINE_CPU_OP(SiluMul)
SPECENGINE_CPU_OP(ClampedSwiglu)
// heads *= sigmoid(gate), a gate behind each head of q in qkv (Qwen3.5).
struct GateHeads {
  TensorView qkv;    // [M, (2H + 2K) * D] float32
  TensorView heads;  // [M, H, D] float32, written; CUDA: or bfloat16 | float16

  Device validate() const {
    Checker check;
    Dim M{"M"}, H{"H"}, D{"D"}, columns{"columns"};
    check(qkv, "qkv", {DType::kFloat32}, {M, columns});  // first: the device is that of a checked tensor
    if (check.for_cuda()) {
      check(heads, "heads", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, H, D});
    } else {
      check(heads, "heads", {DType::kFloat32}, {M, H, D});
    }
    const int64_t rest = columns - 2 * H * D;  // k and v
    if (D < 1 || rest < 2 * D || rest % (2 * D) != 0) {
      fail("qkv: expected (2H + 2K) * D columns with H=", H.value, " and D=", D.value, ", got ", columns.value);
    }
    return check.device();
  }
};

SPECENGINE_CPU_OP(RopeCache)
SPECENGINE_CPU_OP(GateHeads)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const RmsNorm&);
void run_cuda(const SiluMul&);
void run_cuda(const ClampedSwiglu&);
void run_cuda(const RopeCache&);
void run_cuda(const GateHeads&);
#endif

}  // namespace specengine
