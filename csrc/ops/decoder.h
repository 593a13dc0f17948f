// One pass of all decoder layers in one call: rows of a TreeBatch in, hidden states out. It only calls the ops of a
// layer in order (csrc/decoder.cpp), so that Python and dispatch cost nothing per layer.
#pragma once
#include <vector>

#include "base/check.h"
#include "ops/kv_cache.h"
#include "ops/linear.h"

namespace specengine {

// The rows of several weights one after the other, as one projection; all quantised or none.
struct Projection {
  std::vector<TensorView> weights;
  std::vector<int64_t> rows;  // of each weight
  TensorView bias;            // [sum of rows] float32, optional

  int64_t total_rows() const {
    int64_t total = 0;
    for (int64_t r : rows) total += r;
    return total;
  }
  bool quantised() const { return weights.at(0).dtype == DType::kUInt8; }
};

// x as the weights multiply it; out: [M, total_rows()] float32.
void project(const TensorView& x, const Projection& projection, const TensorView& out);
void check_projection(Checker& check, const Projection& p, const char* name, int64_t rows, int64_t columns);

struct DecoderLayer {
  TensorView attention_norm;  // [C] float32; None: the first layer may do without
  Projection qkv;
  TensorView q_norm, k_norm;  // [D] float32, optional
  Projection attention_out;
  TensorView mlp_norm;  // [C] float32
  Projection gate_up, down;
  int64_t window;  // 0: none
};

// The weights of a model, checked once.
struct Decoder {
  TensorView embedding;  // packed [V, C]; None: passes are given their inputs
  std::vector<DecoderLayer> layers;
  TensorView final_norm;  // [C] float32
  int64_t C, H, K, D, I;  // hidden size, query heads, key/value heads, head dim, intermediate size
  float eps;
  int64_t first_columns;  // of what a pass is given for q, k and v of the first layer; 0: its rows themselves
  std::vector<int64_t>
      hidden_state_layers;  // layers whose input is wanted, rising; layers.size(): the last one's output

  void validate() const;
  void validate_layer(Checker& check, const DecoderLayer& layer, int64_t qkv_columns) const;
  // What q, k and v of a layer are made of.
  int64_t qkv_columns(size_t layer) const { return layer == 0 && first_columns > 0 ? first_columns : C; }
  int64_t workspace_bytes(int64_t rows) const;
};

struct DecoderPass {
  const Decoder& decoder;
  TensorView tokens;         // [M] int32; None: inputs are given
  TensorView inputs;         // [M, C] float32, instead of the embeddings of tokens
  TensorView first_inputs;   // [M, first_columns] float32: what q, k and v of the first layer are made of
  TensorView depths;         // [M] int32, root 0
  TensorView ancestors;      // [M, W] int32 bits; None: chains
  TensorView k_cache;        // [layers, P, K, 64, D]; rows of the nodes are written
  TensorView v_cache;        // the same
  TensorView block_table;    // [B, max_pages] int32
  TensorView lengths;        // [B] int32
  TensorView row_start;      // [B + 1] int32
  TensorView cos, sin;       // [T, D/2] float32
  TensorView hidden_states;  // [M, C] float32, written: states after the final norm; None: only the cache is
  TensorView at_layers;      // [M, hidden_state_layers, C] float32, written: the residual stream before the decoder's
                             // hidden_state_layers; None: no hidden_state_layers
  TensorView workspace;      // uint8 [workspace_bytes(M)]
  int64_t first_node;        // see KvCacheView

  Device validate() const;
};

void run_cpu(const DecoderPass& op);

}  // namespace specengine
