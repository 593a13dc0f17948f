#include "ops/decoder.h"

#include <algorithm>
#include <cmath>

#include "ops/layer.h"
#include "ops/tree_attention.h"
#include "workspace.h"

namespace specengine {
namespace {

struct Activations {
  TensorView residual, delta, qkv, q, attended, gate_up;
  TensorView attention_in, out_in, mlp_in, down_in;  // of the projections, quantised where their weights are

  Activations(const Decoder& d, size_t number, int64_t M, Workspace& space)
      : Activations(d, d.layers[number], d.qkv_columns(number), M, space) {}

 private:
  Activations(const Decoder& d, const DecoderLayer& layer, int64_t qkv_columns, int64_t M, Workspace& space)
      : residual(space.floats({M, d.C})),
        delta(space.floats({M, d.C})),
        qkv(space.floats({M, (d.H + 2 * d.K) * d.D})),
        q(space.floats({M, d.H, d.D})),
        attended(space.floats({M, d.H * d.D})),
        gate_up(space.floats({M, 2 * d.I})),
        attention_in(space.rows(M, qkv_columns, layer.qkv)),
        out_in(layer.attention_out.quantised() ? space.rows(M, d.H * d.D, layer.attention_out) : attended),
        mlp_in(space.rows(M, d.C, layer.gate_up)),
        down_in(space.rows(M, d.I, layer.down)) {}
};

KvCacheView cache_of(const DecoderPass& op, int64_t layer) {
  return {layer_of(op.k_cache, layer),
          layer_of(op.v_cache, layer),
          op.block_table,
          op.lengths,
          op.row_start,
          op.first_node,
          op.decoder.K,
          op.decoder.D,
          op.lengths.shape[0]};
}

// What the ops of every layer check again: here nothing is written yet.
void check_values(const DecoderPass& op) {
  const KvCacheView cache = cache_of(op, 0);
  if (op.tokens.defined()) check_ids(op.tokens, "tokens", op.decoder.embedding.shape[0] * kPanel);
  cache.validate_rows(op.depths.shape[0]);
  check_depths(cache, op.depths, op.cos.shape[0]);
  if (op.ancestors.defined()) check_ancestors(cache, op.ancestors);
}

void check_size(const char* name, int64_t size) {
  constexpr int64_t kMost = 1 << 24;  // products of two sizes stay far from overflow
  if (size < 1 || size > kMost) fail(name, ": expected 1 to ", kMost, ", got ", size);
}

}  // namespace

void project(const TensorView& x, const Projection& projection, const TensorView& out) {
  int64_t first = 0;
  for (size_t i = 0; i < projection.weights.size(); ++i) {
    run_cpu(Linear{x, projection.weights[i], projection.bias, out, first, projection.rows[i]});
    first += projection.rows[i];
  }
}

void check_projection(Checker& check, const Projection& p, const char* name, int64_t rows, int64_t columns) {
  if (p.weights.empty() || p.weights.size() != p.rows.size()) fail(name, ": expected one row count per weight");
  for (size_t i = 0; i < p.weights.size(); ++i) {
    Dim P{"P"}, C{"C", columns, "the sizes"};
    check_weight(check, p.weights[i], name, P, C);
    if (p.rows[i] < 1 || (p.rows[i] - 1) / kPanel + 1 != P) {
      fail(name, ": ", p.rows[i], " rows do not match ", P.value, " panels of 16");
    }
    if ((p.weights[i].dtype == DType::kUInt8) != p.quantised()) fail(name, ": quantised and float weights are mixed");
  }
  if (p.total_rows() != rows) fail(name, ": expected ", rows, " rows, got ", p.total_rows());
  check.optional(p.bias, (std::string(name) + " bias").c_str(), {DType::kFloat32}, {rows});
}

void Decoder::validate() const {
  check_size("hidden", C), check_size("heads", H), check_size("kv_heads", K);
  check_size("head_dim", D), check_size("intermediate", I);
  if (D % 2 != 0) fail("head_dim: expected an even number, got ", D);
  if (H % K != 0) fail("heads: ", H, " heads are no multiple of kv_heads=", K);
  if (H / K > TreeAttention::kMaxGroup) {
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
  Dim P{"P"}, columns{"C", C, "hidden"};
  if (embedding.given()) check_weight(check, embedding, "embedding", P, columns);
  check(final_norm, "final_norm", {DType::kFloat32}, {columns});
  for (size_t i = 0; i < layers.size(); ++i) {
    try {
      if (i > 0 && !layers[i].attention_norm.given()) fail("attention_norm: only the first layer may do without");
      if (i == 0 && first_columns > 0 && layers[i].attention_norm.given()) {
        fail("attention_norm: expected None where the first layer is given what it reads");
      }
      validate_layer(check, layers[i], qkv_columns(i));
    } catch (const std::invalid_argument& error) {
      fail("layers: layer ", i, ": ", error.what());
    }
  }
  if (check.device() != Device::kCpu) fail("final_norm: expected a tensor on cpu, got ", name_of(check.device()));
}

void Decoder::validate_layer(Checker& check, const DecoderLayer& layer, int64_t qkv_columns) const {
  Dim columns{"C", C, "hidden"};
  check.optional(layer.attention_norm, "attention_norm", {DType::kFloat32}, {columns});
  check(layer.mlp_norm, "mlp_norm", {DType::kFloat32}, {columns});
  check.optional(layer.q_norm, "q_norm", {DType::kFloat32}, {D});
  check.optional(layer.k_norm, "k_norm", {DType::kFloat32}, {D});
  check_projection(check, layer.qkv, "qkv", (H + 2 * K) * D, qkv_columns);
  check_projection(check, layer.attention_out, "attention_out", C, H * D);
  check_projection(check, layer.gate_up, "gate_up", 2 * I, C);
  check_projection(check, layer.down, "down", C, I);
  if (layer.window < 0) fail("window: expected 0 (none) or a positive number of tokens, got ", layer.window);
}

int64_t Decoder::workspace_bytes(int64_t rows) const {
  int64_t most = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    Workspace space(nullptr);
    Activations(*this, i, rows, space);
    most = std::max(most, space.used());
  }
  return most;
}

Device DecoderPass::validate() const {
  Checker check;
  const Decoder& d = decoder;
  const int64_t layers = static_cast<int64_t>(d.layers.size());
  Dim M{"M"}, P{"P"}, W{"W"}, B{"B"}, max_pages{"max_pages"}, T{"T"}, bytes{"bytes"};
  check.optional(tokens, "tokens", {DType::kInt32}, {M});
  check.optional(inputs, "inputs", {DType::kFloat32}, {M, d.C});
  check(depths, "depths", {DType::kInt32}, {M});
  if (!tokens.defined() && !inputs.defined())
    fail(d.embedding.defined() ? "tokens" : "inputs", ": expected a tensor, got None");
  if (tokens.defined() && inputs.defined()) fail("inputs: expected None beside tokens");
  if (tokens.defined() && !d.embedding.defined()) fail("tokens: this decoder has no embedding");
  check.optional(ancestors, "ancestors", {DType::kInt32}, {M, W});
  check(k_cache, "k_cache", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {layers, P, d.K, kPageSize, d.D});
  check(v_cache, "v_cache", {k_cache.dtype}, {layers, P, d.K, kPageSize, d.D});
  check(block_table, "block_table", {DType::kInt32}, {B, max_pages});
  check(lengths, "lengths", {DType::kInt32}, {B});
  check(row_start, "row_start", {DType::kInt32}, {B + 1});
  if (first_node < 0 || first_node >= kMaxNodes)
    fail("first_node: expected 0 to ", kMaxNodes - 1, " nodes, got ", first_node);
  check(cos, "cos", {DType::kFloat32}, {T, d.D / 2});
  check(sin, "sin", {DType::kFloat32}, {T, d.D / 2});
  if (d.first_columns == 0 && first_inputs.defined()) fail("first_inputs: this decoder's first layer reads its rows");
  if (d.first_columns > 0) check(first_inputs, "first_inputs", {DType::kFloat32}, {M, d.first_columns});
  if (hidden_states.defined() || at_layers.defined())
    check(hidden_states, "hidden_states", {DType::kFloat32}, {M, d.C});
  if (d.hidden_state_layers.empty() && at_layers.defined()) fail("at_layers: this decoder has no hidden_state_layers");
  if (!d.hidden_state_layers.empty() && hidden_states.defined())
    check(at_layers, "at_layers", {DType::kFloat32}, {M, static_cast<int64_t>(d.hidden_state_layers.size()), d.C});
  check(workspace, "workspace", {DType::kUInt8}, {bytes});
  if (bytes < d.workspace_bytes(M)) fail("workspace: expected ", d.workspace_bytes(M), " bytes, got ", bytes.value);
  return check.device();
}

void copy_rows(const TensorView& from, const TensorView& to) {
  std::copy_n(from.as<float>(), from.numel(), to.as<float>());
}

// Keeps the residual stream before a layer where that is wanted; all before it has been added.
void tap(const DecoderPass& op, const TensorView& residual, int64_t layer) {
  const std::vector<int64_t>& hidden_state_layers = op.decoder.hidden_state_layers;
  const auto found = std::find(hidden_state_layers.begin(), hidden_state_layers.end(), layer);
  if (found == hidden_state_layers.end()) return;
  const int64_t C = op.decoder.C, stride = static_cast<int64_t>(hidden_state_layers.size()) * C;
  const float* from = residual.as<float>();
  float* to = op.at_layers.as<float>() + (found - hidden_state_layers.begin()) * C;
  for (int64_t m = 0; m < residual.shape[0]; ++m) std::copy_n(from + m * C, C, to + m * stride);
}

void run_cpu(const DecoderPass& op) {
  check_values(op);
  const Decoder& d = op.decoder;
  const int64_t M = op.depths.shape[0];
  TensorView delta;  // what the last block adds to the residual; nothing yet
  Workspace first(op.workspace.as<uint8_t>());
  const TensorView residual = first.floats({M, d.C});  // residual and delta lie at the same place for every layer
  if (op.tokens.defined()) {
    run_cpu(GatherRows{d.embedding, op.tokens, residual});
  } else {
    copy_rows(op.inputs, residual);
  }
  for (size_t i = 0; i < d.layers.size(); ++i) {
    const DecoderLayer& layer = d.layers[i];
    Workspace space(op.workspace.as<uint8_t>());
    const Activations a(d, i, M, space);
    const KvCacheView cache = cache_of(op, static_cast<int64_t>(i));
    if (layer.attention_norm.defined()) {
      run_cpu(RmsNorm{a.residual, delta, layer.attention_norm, a.attention_in, d.eps});
    } else {
      const TensorView& from = d.first_columns > 0 ? op.first_inputs : a.residual;
      layer.qkv.quantised() ? run_cpu(QuantiseRows{from, a.attention_in}) : copy_rows(from, a.attention_in);
    }
    if (op.hidden_states.defined()) tap(op, a.residual, static_cast<int64_t>(i));
    project(a.attention_in, layer.qkv, a.qkv);
    run_cpu(RopeCache{a.qkv, op.cos, op.sin, layer.q_norm, layer.k_norm, op.depths, cache, a.q, d.eps});
    if (!op.hidden_states.defined() && i + 1 == d.layers.size()) return;
    TensorView heads = a.attended;
    heads.ndim = 3, heads.shape[1] = d.H, heads.shape[2] = d.D, heads.strides[1] = d.D, heads.strides[2] = 1;
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d.D)));
    run_cpu(TreeAttention{a.q, cache, op.ancestors, heads, scale, layer.window, true, {}});
    if (layer.attention_out.quantised()) run_cpu(QuantiseRows{a.attended, a.out_in});
    project(a.out_in, layer.attention_out, a.delta);
    run_cpu(RmsNorm{a.residual, a.delta, layer.mlp_norm, a.mlp_in, d.eps});
    project(a.mlp_in, layer.gate_up, a.gate_up);
    run_cpu(SiluMul{a.gate_up, a.down_in});
    project(a.down_in, layer.down, a.delta);
    delta = a.delta;
  }
  run_cpu(RmsNorm{residual, delta, d.final_norm, op.hidden_states, d.eps});
  tap(op, residual, static_cast<int64_t>(d.layers.size()));
}

}  // namespace specengine
