// The gated delta rule (Yang et al. 2024) as Qwen3.5 has it: layers with a recurrent state in place of keys and values.
//
// Each value head has a matrix S [Dk, Dv]. A token with key k, value v, decay a and rate b makes of its parent's S
//   S' = a S;  S = S' + k (b (v - S'^T k))^T;  its output is S^T q.
// This recurrence, token by token, defines the bits: they depend on a token's path alone, not on the rows of its pass.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "ops/kv_cache.h"

namespace specengine {

constexpr int64_t kConvWidth = 4;
constexpr int kMaxDeltaDim = 128;  // of the CUDA kernels: a head's state lies in registers of 512 threads

// The weights of a layer beside its projections, for Hk key heads and Hv value heads of Dk and Dv components.
struct GatedDeltaLayer {
  TensorView conv;     // [4, C] float32, C = 2 Hk Dk + Hv Dv; the last row multiplies the token itself
  TensorView decay;    // [Hv] float32, negative
  TensorView dt_bias;  // [Hv] float32
  TensorView norm;     // [Dv] float32
  int64_t key_heads;
  bool tiled;  // whether value head j reads key head j % Hk, not j / (Hv / Hk)

  void validate() const;
  void validate(Checker& check) const;
  int64_t value_heads() const { return decay.shape[0]; }
  int64_t value_dim() const { return norm.shape[0]; }
  int64_t values() const { return value_heads() * value_dim(); }
  int64_t channels() const { return conv.shape[1]; }
  int64_t key_dim() const { return (channels() - values()) / (2 * key_heads); }
  int64_t key_head(int64_t head) const { return tiled ? head % key_heads : head / (value_heads() / key_heads); }
  // Columns of a row of the layer's projection: q, k and v (the channels), then z, b and a.
  int64_t row_columns() const { return channels() + values() + 2 * value_heads(); }
  // Floats that a row leaves for CompactStates: inputs of the convolution, its outputs, decays and rates.
  int64_t record_floats() const { return 2 * channels() + 2 * value_heads(); }
};

// The states of all layers, with the batch they serve. A request owns one slot. A pass whose rows are final, chains
// that are part of their texts, writes the states behind them; otherwise it writes records, and CompactStates the
// states.
struct DeltaStates {
  static constexpr char kRecord[] = "DeltaStates";
  OptionalTensor states;   // [slots, layers, Hv, Dk, Dv] float32; None: a model without such layers
  OptionalTensor conv;     // [slots, layers, 3, C] float32, the last inputs of the convolution, the newest last
  OptionalTensor slots;    // [B] int32
  OptionalTensor records;  // [layers, M, record_floats] float32, written; [1, M, record_floats] where final
  bool final;

  int64_t layers() const { return states.shape[1]; }
  void validate(Checker& check, int64_t requests, Dim& rows) const;
  void validate_slots() const;  // Host-readable tensors only.
  int64_t slot(int64_t b) const { return slots.as<int32_t>()[b]; }
  float* state(int64_t b, int64_t layer, int64_t head) const {
    const int64_t heads = states.shape[2], floats = states.shape[3] * states.shape[4];
    return states.as<float>() + ((slot(b) * layers() + layer) * heads + head) * floats;
  }
  float* conv_inputs(int64_t b, int64_t layer) const {
    return conv.as<float>() + (slot(b) * layers() + layer) * conv.shape[2] * conv.shape[3];
  }
  float* record(int64_t layer, int64_t row) const {
    return records.as<float>() + ((final ? 0 : layer) * records.shape[1] + row) * records.shape[2];
  }
};

// One layer of a pass: out = norm(S^T q) * silu(z), a head at a time.
// CUDA: in trees a row without any ancestor bit, or behind the last request's rows, is padding and becomes zeros; the
// slot of a request that has only padding is not read. Every row of chains belongs to a request.
struct GatedDelta {
  TensorView rows;  // [M, row_columns] float32, of the layer's projection
  const GatedDeltaLayer* layer;
  DeltaStates states;
  int64_t number;            // of the layer among those with states
  TensorView row_start;      // [B + 1] int32
  OptionalTensor ancestors;  // [M, W] int32 bits; None: chains
  TensorView out;            // [M, Hv Dv] float32, written; CUDA: or bfloat16 | float16
  float eps;

  Device validate() const;
};

// Writes the states behind the accepted paths, all layers in one call, from the records of the pass.
struct CompactStates {
  DeltaStates states;
  TensorView row_start;    // [B + 1] int32
  TensorView path;         // [B, N] int32, ascending node indices
  TensorView path_length;  // [B] int32
  int64_t key_heads;       // see GatedDeltaLayer
  bool tiled;

  Device validate() const;
};

SPECENGINE_CPU_OP(GatedDelta)
SPECENGINE_CPU_OP(CompactStates)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const GatedDelta&);
void run_cuda(const CompactStates&);
#endif

}  // namespace specengine
