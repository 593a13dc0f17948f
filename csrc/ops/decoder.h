// One pass of all decoder layers in one call: rows of a TreeBatch in, hidden states out. It calls the ops of a layer in
// order (cpu/passes/decoder.cpp), so that Python and dispatch cost nothing per layer.
#pragma once
#include <vector>

#include "base/check.h"
#include "ops/experts/experts.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/kv_cache.h"
#include "ops/linear.h"
#include "ops/lora.h"

namespace specengine {

// The rows of several weights one after the other, as one projection. All multiply rows quantised to int8, or all
// rows of floats.
struct Projection {
  std::vector<TensorView> weights;
  std::vector<int64_t> rows;  // of each weight
  OptionalTensor bias;        // [sum of rows] float32
  OptionalTensor columns;     // [C] int32, the order in which x's columns are multiplied; None: as they are
  bool float_rows;            // whether codes multiply rows of floats

  int64_t total_rows() const {
    int64_t total = 0;
    for (int64_t r : rows) total += r;
    return total;
  }
  bool given() const { return !weights.empty(); }
  bool quantises_rows() const { return !float_rows && specengine::quantises_rows(weights.at(0)); }
};

// The same of E experts: each weight has their panels one after the other.
struct ExpertProjection {
  std::vector<TensorView> weights;
  std::vector<int64_t> rows;  // of each weight, of one expert
  OptionalTensor bias;        // [E, sum of rows] float32
  bool float_rows;            // whether codes multiply rows of floats

  bool quantises_rows() const { return !float_rows && specengine::quantises_rows(weights.at(0)); }
};

// A product of a group of experts' rows; its fields as in ExpertLinear.
void project(const TensorView& x, const OptionalTensor& rows, const ExpertProjection& projection,
             const TensorView& starts, const TensorView& out);
// x as the weights multiply it; out: [M, total_rows()] float32.
void project(const TensorView& x, const Projection& projection, const TensorView& out);
// ordered: whether the caller knows orders of columns.
void check_projection(Checker& check, const ExpertProjection& p, const char* name, int64_t experts, int64_t rows,
                      int64_t columns);
void check_projection(Checker& check, const Projection& p, const char* name, int64_t rows, int64_t columns,
                      bool ordered = false);

// The experts of a layer. Beside them gate_up and down of the layer, where it has them, are the shared expert.
struct MoeLayer {
  TensorView router;           // [E, hidden], see RouteRows
  OptionalTensor router_bias;  // [E] float32
  OptionalTensor shared_gate;  // [hidden] float32
  bool renormalise;            // see RouteRows
  int64_t per_token;
  int64_t intermediate;  // of one expert
  ExpertProjection gate_up;
  ExpertProjection down;
  float swiglu_limit;  // 0: silu(gate) * up, else see ClampedSwiglu
  float swiglu_alpha;

  int64_t experts() const { return router.shape[0]; }
};

struct DecoderLayer {
  OptionalTensor attention_norm;  // [hidden] float32; only the first layer may do without
  Projection qkv;
  OptionalTensor q_norm;  // [head_dim] or [heads * head_dim] float32, see RopeCache
  OptionalTensor k_norm;  // [head_dim] or [kv_heads * head_dim] float32
  Projection attention_out;
  TensorView mlp_norm;  // [hidden] float32
  Projection gate_up;   // without weights in a layer of experts alone
  Projection down;
  int64_t window;                            // 0: none
  std::vector<MoeLayer> moe;                 // one, or none in a layer without experts
  OptionalTensor sinks;                      // [heads] float32, see TreeAttention
  std::vector<GatedDeltaLayer> gated_delta;  // one in place of attention, or none; qkv then makes its rows

  bool has_attention() const { return gated_delta.empty(); }
  int64_t intermediate() const { return gate_up.total_rows() / 2; }
};

// Factors of a pass, as Granite's models have them; 1, 1 / sqrt(head_dim) and 1 for others. The residual stream is kept
// divided by `residual`: blocks then add to it what they compute, and its RMSNorm is the same with eps / residual^2.
struct Multipliers {
  static constexpr char kRecord[] = "Multipliers";
  float embedding;  // of the rows that enter the first layer
  float attention;  // of scores before their softmax
  float residual;   // of what a block adds to the residual stream

  void validate() const;
};

// The weights of a model, checked once.
struct Decoder {
  OptionalTensor embedding;  // packed [V, hidden]; None: every pass is given its inputs
  std::vector<DecoderLayer> layers;
  TensorView final_norm;  // [hidden] float32
  int64_t hidden;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t intermediate;  // of layers without experts
  float eps;
  int64_t first_columns;  // columns of first_inputs, from which the first layer makes q, k and v; 0: from its rows
  std::vector<int64_t> hidden_state_layers;  // layers whose input is written, rising; layers.size(): the last output
  std::vector<LoraLayer> lora;               // adapters of each layer, all of the same number; empty: none
  Multipliers multipliers;
  int64_t rotated;  // components of a head that positions rotate, its first ones

  void validate() const;
  void validate_lora() const;
  // Layers with keys and values, and layers with states.
  int64_t attention_layers() const;
  int64_t state_layers() const { return static_cast<int64_t>(layers.size()) - attention_layers(); }
  int64_t adapters() const;
  void validate_layer(Checker& check, const DecoderLayer& layer, int64_t qkv_columns) const;
  void validate_experts(Checker& check, const DecoderLayer& layer) const;
  int64_t attention_rows(const DecoderLayer& layer) const;  // columns that attention_out reads
  // Columns from which a layer makes q, k and v.
  int64_t qkv_columns(size_t layer) const { return layer == 0 && first_columns > 0 ? first_columns : hidden; }
  int64_t workspace_bytes(int64_t rows) const;
  // Epsilon of the norms of the residual stream.
  float stream_eps() const { return eps / (multipliers.residual * multipliers.residual); }
};

// Rotary tables of T positions.
struct RopeTables {
  static constexpr char kRecord[] = "RopeTables";
  TensorView cos;  // [T, rotated / 2] float32
  TensorView sin;  // [T, rotated / 2] float32
};

// What a pass writes beside the cache.
struct PassOutputs {
  static constexpr char kRecord[] = "PassOutputs";
  OptionalTensor hidden_states;  // [M, hidden] float32: states after the final norm; None: only the cache is written
  OptionalTensor at_layers;      // [M, hidden_state_layers, hidden] float32: the residual stream before the decoder's
                                 // hidden_state_layers; None: it has none
  OptionalTensor experts = {};   // [layers] int32: how many experts each layer read; None: not counted
};

struct DecoderPass {
  const Decoder* decoder;
  OptionalTensor tokens;        // [M] int32; None: inputs are given
  OptionalTensor inputs;        // [M, hidden] float32, in place of the tokens' embeddings
  OptionalTensor first_inputs;  // [M, first_columns] float32: the first layer makes q, k and v from them
  TensorView depths;            // [M] int32, root 0
  OptionalTensor ancestors;     // [M, W] int32 bits; None: chains
  KvCacheView cache;            // all layers with attention; the nodes' slots are written
  RopeTables rope;
  PassOutputs outputs;
  TensorView workspace;          // uint8 [workspace_bytes(M)]
  OptionalTensor adapters = {};  // [B] int32, the adapter of each request, -1: none; None: of no request
  DeltaStates states = {};       // of layers of gated delta rule; without tensors where there are none

  Device validate() const;
};

void run_cpu(const DecoderPass& op);

}  // namespace specengine
