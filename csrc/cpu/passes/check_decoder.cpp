// What a decoder and a pass are made of, checked: sizes, shapes, and what does not go together.
#include <algorithm>
#include <cmath>

#include "ops/decoder.h"
#include "ops/layer.h"
#include "ops/tree_attention.h"

namespace specengine {
namespace {

void check_size(const char* name, int64_t size) {
  constexpr int64_t kMost = 1 << 24;  // products of two sizes stay far from overflow
  if (size < 1 || size > kMost) fail(name, ": expected 1 to ", kMost, ", got ", size);
}

}  // namespace

void check_projection(Checker& check, const ExpertProjection& p, const char* name, int64_t experts, int64_t rows,
                      int64_t columns) {
  if (p.weights.empty() || p.weights.size() != p.rows.size()) fail(name, ": expected one row count per weight");
  int64_t total = 0;
  for (size_t i = 0; i < p.weights.size(); ++i) {
    Dim P{"P"}, C{"C", columns, "the sizes"};
    check_weight(check, p.weights[i], name, P, C);
    if (p.rows[i] < 1 || experts * blocks_of(p.rows[i], kPanel) != P) {
      fail(name, ": ", experts, " experts of ", p.rows[i], " rows do not match ", P.value, " panels of 16");
    }
    if (!p.float_rows && quantises_rows(p.weights[i]) != p.quantises_rows()) {
      fail(name, ": weights of int8 rows and of floats are mixed");
    }
    total += p.rows[i];
  }
  if (total != rows) fail(name, ": expected ", rows, " rows, got ", total);
  check.optional(p.bias, (std::string(name) + " bias").c_str(), {DType::kFloat32}, {experts, rows});
}

void check_projection(Checker& check, const Projection& p, const char* name, int64_t rows, int64_t columns,
                      bool ordered) {
  if (p.weights.empty() || p.weights.size() != p.rows.size()) fail(name, ": expected one row count per weight");
  for (size_t i = 0; i < p.weights.size(); ++i) {
    Dim P{"P"}, C{"C", columns, "the sizes"};
    check_weight(check, p.weights[i], name, P, C);
    if (p.rows[i] < 1 || (p.rows[i] - 1) / kPanel + 1 != P) {
      fail(name, ": ", p.rows[i], " rows do not match ", P.value, " panels of 16");
    }
    if (!p.float_rows && quantises_rows(p.weights[i]) != p.quantises_rows())
      fail(name, ": weights of int8 rows and of floats are mixed");
  }
  if (p.total_rows() != rows) fail(name, ": expected ", rows, " rows, got ", p.total_rows());
  check.optional(p.bias, (std::string(name) + " bias").c_str(), {DType::kFloat32}, {rows});
  if (!p.columns.given()) return;
  if (!ordered || !p.quantises_rows()) fail(name, ": expected no order of columns here");
  QuantiseRows::check_columns(check, p.columns, columns);
}

void Multipliers::validate() const {
  const auto check = [](const char* name, float value) {
    if (!(value > 0 && std::isfinite(value))) fail(name, " multiplier: expected a positive number, got ", value);
  };
  check("embedding", embedding);
  check("attention", attention);
  check("residual", residual);
}

void Decoder::validate() const {
  multipliers.validate();
  check_size("hidden", hidden);
  check_size("heads", heads);
  check_size("kv_heads", kv_heads);
  check_size("head_dim", head_dim);
  const auto dense = [](const DecoderLayer& layer) { return layer.moe.empty(); };
  if (std::any_of(layers.begin(), layers.end(), dense)) check_size("intermediate", intermediate);
  if (head_dim % 2 != 0) fail("head_dim: expected an even number, got ", head_dim);
  if (rotated < 2 || rotated > head_dim || rotated % 2 != 0) {
    fail("rotated: expected an even number from 2 to head_dim=", head_dim, ", got ", rotated);
  }
  if (heads % kv_heads != 0) fail("heads: ", heads, " heads are no multiple of kv_heads=", kv_heads);
  if (heads / kv_heads > TreeAttention::kMaxGroup) {
    fail("heads: at most ", TreeAttention::kMaxGroup, " query heads per key/value head are supported");
  }
  if (layers.empty()) fail("layers: expected at least one");
  if (first_columns != 0) check_size("first_columns", first_columns);
  for (size_t i = 0; i < hidden_state_layers.size(); ++i) {
    if (hidden_state_layers[i] < 0 || hidden_state_layers[i] > static_cast<int64_t>(layers.size()) ||
        (i > 0 && hidden_state_layers[i] <= hidden_state_layers[i - 1])) {
      fail("hidden_state_layers: expected rising numbers from 0 to ", layers.size(), ", got ", hidden_state_layers[i]);
    }
  }
  Checker check;
  Dim P{"P"}, columns{"C", hidden, "hidden"};
  if (embedding.given()) check_weight(check, embedding, "embedding", P, columns);
  check(final_norm, "final_norm", {DType::kFloat32}, {columns});
  for (size_t i = 0; i < layers.size(); ++i) {
    try {
      if (i > 0 && !layers[i].attention_norm.given()) fail("attention_norm: only the first layer may do without");
      if (i == 0 && first_columns > 0 && layers[i].attention_norm.given()) {
        fail("attention_norm: expected None where the first layer is given its rows");
      }
      if (multipliers.residual != 1.0f && !layers[i].attention_norm.given()) {
        fail("attention_norm: expected a tensor where the residual stream is kept divided");
      }
      validate_layer(check, layers[i], qkv_columns(i));
    } catch (const std::invalid_argument& error) {
      fail("layers: layer ", i, ": ", error.what());
    }
  }
  if (check.device() != Device::kCpu) fail("final_norm: expected a tensor on cpu, got ", name_of(check.device()));
  validate_lora();
}

int64_t Decoder::attention_layers() const {
  return std::count_if(layers.begin(), layers.end(), [](const DecoderLayer& layer) { return layer.has_attention(); });
}

int64_t Decoder::attention_rows(const DecoderLayer& layer) const {
  return layer.has_attention() ? heads * head_dim : layer.gated_delta[0].values();
}

int64_t Decoder::adapters() const {
  int64_t count = 0;
  for (const LoraLayer& layer : lora) {
    for (const LoraProjection* p : {&layer.qkv, &layer.attention_out, &layer.gate_up, &layer.down}) {
      count = std::max(count, p->adapters());
    }
  }
  return count;
}

void Decoder::validate_lora() const {
  if (lora.empty()) return;
  if (lora.size() != layers.size()) fail("lora: expected ", layers.size(), " layers, got ", lora.size());
  if (first_columns > 0) fail("lora: the first layer reads rows of its own, which no adapter knows");
  for (size_t i = 0; i < lora.size(); ++i) {
    const LoraLayer& layer = lora[i];
    if (!layers[i].moe.empty() && !(layer.gate_up.modules.empty() && layer.down.modules.empty())) {
      fail("lora: layer ", i, " has experts, which take no adapters");
    }
    layer.qkv.check_place("lora: qkv", layers[i].qkv.total_rows(), hidden);
    layer.attention_out.check_place("lora: attention_out", hidden, attention_rows(layers[i]));
    layer.gate_up.check_place("lora: gate_up", 2 * intermediate, hidden);
    layer.down.check_place("lora: down", hidden, intermediate);
    for (const LoraProjection* p : {&layer.qkv, &layer.attention_out, &layer.gate_up, &layer.down}) {
      if (!p->modules.empty() && p->adapters() != adapters()) fail("lora: layers differ in the number of adapters");
      for (const LoraModule& module : p->modules) {
        if (module.a.device != Device::kCpu) fail("lora: expected tensors on cpu, got ", name_of(module.a.device));
      }
    }
  }
}

void Decoder::validate_layer(Checker& check, const DecoderLayer& layer, int64_t qkv_columns) const {
  Dim columns{"C", hidden, "hidden"};
  check.optional(layer.attention_norm, "attention_norm", {DType::kFloat32}, {columns});
  check(layer.mlp_norm, "mlp_norm", {DType::kFloat32}, {columns});
  check_head_norm(check, layer.q_norm, "q_norm", heads, head_dim);
  check_head_norm(check, layer.k_norm, "k_norm", kv_heads, head_dim);
  if (layer.gated_delta.size() > 1) fail("gated_delta: expected at most one, got ", layer.gated_delta.size());
  int64_t rows = (heads + 2 * kv_heads) * head_dim;
  if (!layer.has_attention()) {
    rows = layer.gated_delta[0].row_columns();
    if (layer.q_norm.given() || layer.k_norm.given() || layer.sinks.given() || layer.window != 0) {
      fail("gated_delta: expected no q_norm, k_norm, sinks or window beside it");
    }
  } else if (layer.qkv.total_rows() == rows + heads * head_dim) {
    rows += heads * head_dim;  // gates
    if (layer.q_norm.given() && layer.q_norm.shape[0] != head_dim)
      fail("q_norm: expected [", head_dim, "] beside gates");
  }
  check_projection(check, layer.qkv, "qkv", rows, qkv_columns, layer.attention_norm.given());
  check_projection(check, layer.attention_out, "attention_out", hidden, attention_rows(layer), true);
  if (layer.moe.size() > 1) fail("moe: expected at most one, got ", layer.moe.size());
  if (layer.moe.empty() || layer.gate_up.given() || layer.down.given()) {
    const int64_t inner = layer.moe.empty() ? intermediate : layer.intermediate();
    check_projection(check, layer.gate_up, "gate_up", 2 * inner, hidden, true);
    check_projection(check, layer.down, "down", hidden, inner, true);
  }
  if (!layer.moe.empty()) validate_experts(check, layer);
  check.optional(layer.sinks, "sinks", {DType::kFloat32}, {heads});
  if (layer.window < 0) fail("window: expected 0 (none) or a positive number of tokens, got ", layer.window);
}

void Decoder::validate_experts(Checker& check, const DecoderLayer& layer) const {
  const MoeLayer& moe = layer.moe[0];
  Dim E{"E"}, columns{"C", hidden, "hidden"};
  check(moe.router, "router", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {E, columns});
  check.optional(moe.router_bias, "router_bias", {DType::kFloat32}, {E});
  check.optional(moe.shared_gate, "shared_gate", {DType::kFloat32}, {columns});
  if (moe.shared_gate.given() && !layer.gate_up.given()) fail("shared_gate: expected None without a shared expert");
  if (E > kMostExperts) fail("router: expected at most ", kMostExperts, " experts, got ", E.value);
  const int64_t most = std::min<int64_t>(E, kMostPerToken);
  if (moe.per_token < 1 || moe.per_token > most) fail("per_token: expected 1 to ", most, ", got ", moe.per_token);
  check_size("experts' intermediate", moe.intermediate);
  if (!(moe.swiglu_limit >= 0)) fail("swiglu_limit: expected 0 or a positive number, got ", moe.swiglu_limit);
  check_projection(check, moe.gate_up, "experts' gate_up", E, 2 * moe.intermediate, hidden);
  check_projection(check, moe.down, "experts' down", E, hidden, moe.intermediate);
}

Device DecoderPass::validate() const {
  Checker check;
  const Decoder& d = *decoder;
  const int64_t layers = static_cast<int64_t>(d.layers.size());
  Dim M{"M"}, W{"W"}, T{"T"}, bytes{"bytes"};
  check.optional(tokens, "tokens", {DType::kInt32}, {M});
  check.optional(inputs, "inputs", {DType::kFloat32}, {M, d.hidden});
  check(depths, "depths", {DType::kInt32}, {M});
  if (!tokens.defined() && !inputs.defined())
    fail(d.embedding.defined() ? "tokens" : "inputs", ": expected a tensor, got None");
  if (tokens.defined() && inputs.defined()) fail("inputs: expected None beside tokens");
  if (tokens.defined() && !d.embedding.defined()) fail("tokens: this decoder has no embedding");
  check.optional(ancestors, "ancestors", {DType::kInt32}, {M, W});
  cache.validate(check, d.attention_layers(), d.kv_heads, d.head_dim);
  check(rope.cos, "cos", {DType::kFloat32}, {T, d.rotated / 2});
  check(rope.sin, "sin", {DType::kFloat32}, {T, d.rotated / 2});
  if (d.state_layers() == 0 && states.states.given()) fail("states: this decoder has no layers of gated delta rule");
  if (d.state_layers() > 0) {
    states.validate(check, cache.requests(), M);
    if (states.layers() != d.state_layers()) {
      fail("states: expected ", d.state_layers(), " layers, got ", states.layers());
    }
    if (cache.first_node != 0) fail("first_node: expected 0, states begin at the root");
  }
  if (d.first_columns == 0 && first_inputs.defined()) fail("first_inputs: this decoder's first layer reads its rows");
  if (d.first_columns > 0) check(first_inputs, "first_inputs", {DType::kFloat32}, {M, d.first_columns});
  if (outputs.hidden_states.defined() || outputs.at_layers.defined())
    check(outputs.hidden_states, "hidden_states", {DType::kFloat32}, {M, d.hidden});
  if (d.hidden_state_layers.empty() && outputs.at_layers.defined())
    fail("at_layers: this decoder has no hidden_state_layers");
  if (!d.hidden_state_layers.empty() && outputs.hidden_states.defined())
    check(outputs.at_layers, "at_layers", {DType::kFloat32},
          {M, static_cast<int64_t>(d.hidden_state_layers.size()), d.hidden});
  check.optional(adapters, "adapters", {DType::kInt32}, {cache.requests()});
  if (adapters.defined() && d.lora.empty()) fail("adapters: this decoder has none");
  check.optional(outputs.experts, "experts", {DType::kInt32}, {layers});
  check(workspace, "workspace", {DType::kUInt8}, {bytes});
  if (bytes < d.workspace_bytes(M)) fail("workspace: expected ", d.workspace_bytes(M), " bytes, got ", bytes.value);
  return check.device();
}

}  // namespace specengine
