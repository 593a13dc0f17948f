#include "ops/decoder.h"

#include <algorithm>
#include <optional>

#include "cpu/passes/workspace.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/layer.h"
#include "ops/tree_attention.h"

namespace specengine {
namespace {

// What the experts of a layer read and write.
struct ExpertActivations {
  TensorView logits, experts, weights, shared_scale, starts, rows, places;
  TensorView in, gate_up, down_in, out;

  ExpertActivations(const MoeLayer& moe, int64_t hidden, int64_t M, Workspace& space)
      : logits(space.floats({M, moe.experts()})),
        experts(space.ints({M, moe.per_token})),
        weights(space.floats({M, moe.per_token})),
        shared_scale(space.floats({M})),
        starts(space.ints({moe.experts() + 1})),
        rows(space.ints({M * moe.per_token})),
        places(space.ints({M, moe.per_token})),
        in(moe.gate_up.quantises_rows() ? space.rows(M, hidden, moe.gate_up) : TensorView{}),
        gate_up(space.floats({M * moe.per_token, 2 * moe.intermediate})),
        down_in(space.rows(M * moe.per_token, moe.intermediate, moe.down)),
        out(space.floats({M * moe.per_token, hidden})) {}
};

struct Activations {
  TensorView residual, delta, qkv, q, attended, gate_up;
  TensorView attention_in, out_in;  // inputs of the projections, quantised if their weights are
  TensorView mlp_in, down_in;
  TensorView normed, gated;  // floats for adapters, and for projections with another order of columns
  TensorView lora_sums;
  std::optional<ExpertActivations> experts;

  Activations(const Decoder& d, size_t number, int64_t M, Workspace& space)
      : Activations(d, d.layers[number], d.lora.empty() ? nullptr : &d.lora[number], d.qkv_columns(number), M, space) {}

 private:
  Activations(const Decoder& d, const DecoderLayer& layer, const LoraLayer* lora, int64_t qkv_columns, int64_t M,
              Workspace& space)
      : residual(space.floats({M, d.hidden})),
        delta(space.floats({M, d.hidden})),
        qkv(space.floats({M, layer.qkv.total_rows()})),
        q(layer.has_attention() ? space.floats({M, d.heads, d.head_dim}) : TensorView{}),
        attended(space.floats({M, d.attention_rows(layer)})),
        attention_in(space.rows(M, qkv_columns, layer.qkv)),
        out_in(layer.attention_out.quantises_rows() ? space.rows(M, d.attention_rows(layer), layer.attention_out)
                                                    : attended) {
    const bool dense = layer.gate_up.given();
    if (dense) {
      gate_up = space.floats({M, 2 * layer.intermediate()});
      mlp_in = space.rows(M, d.hidden, layer.gate_up);
      down_in = space.rows(M, layer.intermediate(), layer.down);
    }
    const bool reorders = layer.qkv.columns.given() || layer.gate_up.columns.given();
    if (lora || reorders || !layer.moe.empty()) normed = space.floats({M, d.hidden});
    if (lora || layer.down.columns.given()) gated = space.floats({M, layer.intermediate()});
    if (!layer.moe.empty()) experts.emplace(layer.moe[0], d.hidden, M, space);
    if (!lora) return;
    int64_t most = 0;
    for (const LoraProjection* p : {&lora->qkv, &lora->attention_out, &lora->gate_up, &lora->down}) {
      most = std::max(most, p->workspace_floats(M));
    }
    lora_sums = space.floats({most});
  }
};

// Rows of floats for a projection that reads floats or int8.
void copy_rows(const TensorView& from, const TensorView& to, const OptionalTensor& columns = {}) {
  if (to.dtype == DType::kUInt8) return run_cpu(QuantiseRows{from, to, columns});
  std::copy_n(from.as<float>(), from.numel(), to.as<float>());
}

void multiply(const TensorView& rows, float factor) {
  if (factor == 1.0f) return;
  float* x = rows.as<float>();
  for (int64_t i = 0; i < rows.numel(); ++i) x[i] *= factor;
}

// Adds what the requests' adapters add to a projection; nothing in a pass without adapters.
class Adapters {
 public:
  Adapters(const DecoderPass& op, size_t layer)
      : op_(op), lora_(op.adapters.defined() ? &op.decoder->lora[layer] : nullptr) {}

  // Where an op writes rows that a projection reads: as floats first, if adapters read them too or columns move.
  const TensorView& rows(const TensorView& floats, const TensorView& packed, const Projection& reader) const {
    return (lora_ && packed.dtype == DType::kUInt8) || reader.columns.defined() ? floats : packed;
  }
  // The projection of `in`, an op's output at rows(floats, packed, projection).
  void project(const TensorView& in, const TensorView& packed, const Projection& projection,
               LoraProjection LoraLayer::* lora, const TensorView& out, const TensorView& sums) const {
    if (in.data != packed.data) copy_rows(in, packed, projection.columns);
    if (!lora_) return specengine::project(packed, projection, out);
    const AddLora added{in, &(lora_->*lora), op_.cache.row_start, op_.adapters, out, sums};
    run_cpu(StartLora{&added});
    specengine::project(packed, projection, out);
    run_cpu(FinishLora{&added});
  }

 private:
  const DecoderPass& op_;
  const LoraLayer* lora_;
};

// Checks values that the ops of every layer check again: at this point nothing is written.
void check_values(const DecoderPass& op) {
  const KvCacheView cache = op.cache.layer(0);
  if (op.states.states.defined()) op.states.validate_slots();
  if (op.tokens.defined()) check_ids(op.tokens, "tokens", op.decoder->embedding.shape[0] * kPanel);
  cache.validate_rows(op.depths.shape[0]);
  check_depths(cache, op.depths, op.rope.cos.shape[0]);
  if (op.ancestors.defined()) check_ancestors(cache, op.ancestors);
  for (int64_t b = 0; op.adapters.defined() && b < cache.requests(); ++b) {
    AddLora::check_adapter(op.adapters, b, op.decoder->adapters());
  }
}

}  // namespace

void project(const TensorView& x, const Projection& projection, const TensorView& out) {
  int64_t first = 0;
  for (size_t i = 0; i < projection.weights.size(); ++i) {
    run_cpu(Linear{x, projection.weights[i], projection.bias, out, first, projection.rows[i]});
    first += projection.rows[i];
  }
}

void project(const TensorView& x, const OptionalTensor& rows, const ExpertProjection& projection,
             const TensorView& starts, const TensorView& out) {
  int64_t first = 0;
  for (size_t i = 0; i < projection.weights.size(); ++i) {
    const int64_t columns = projection.rows[i];
    run_cpu(ExpertLinear{x, rows, projection.weights[i], projection.bias, starts, out, first, columns});
    first += columns;
  }
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

// Writes the residual stream before a layer to at_layers if the decoder lists that layer.
void write_at_layer(const DecoderPass& op, const TensorView& residual, int64_t layer) {
  const std::vector<int64_t>& hidden_state_layers = op.decoder->hidden_state_layers;
  const auto found = std::find(hidden_state_layers.begin(), hidden_state_layers.end(), layer);
  if (found == hidden_state_layers.end()) return;
  const int64_t C = op.decoder->hidden, stride = static_cast<int64_t>(hidden_state_layers.size()) * C;
  const float* from = residual.as<float>();
  float* to = op.outputs.at_layers.as<float>() + (found - hidden_state_layers.begin()) * C;
  const float factor = op.decoder->multipliers.residual;
  for (int64_t m = 0; m < residual.shape[0]; ++m) {
    std::transform(from + m * C, from + (m + 1) * C, to + m * stride, [factor](float x) { return factor * x; });
  }
}

// The experts' part of a layer; delta holds what the shared expert makes, and the sum of both then.
void run_experts(const DecoderPass& op, size_t number, const Activations& a, bool shared) {
  const MoeLayer& moe = op.decoder->layers[number].moe[0];
  const ExpertActivations& e = *a.experts;
  const OptionalTensor scale = moe.shared_gate.defined() ? e.shared_scale : OptionalTensor{};
  run_cpu(RouteRows{a.normed, moe.router, moe.router_bias, moe.shared_gate, e.logits, e.experts, e.weights, scale,
                    moe.renormalise});
  run_cpu(GroupPairs{e.experts, e.starts, e.rows, e.places});
  if (op.outputs.experts.defined()) {
    const int32_t* starts = e.starts.as<int32_t>();
    int32_t& read = op.outputs.experts.as<int32_t>()[number];
    for (int64_t expert = 0; expert < moe.experts(); ++expert) read += starts[expert + 1] > starts[expert];
  }
  if (e.in.defined()) run_cpu(QuantiseRows{a.normed, e.in});
  project(e.in.defined() ? e.in : a.normed, e.rows, moe.gate_up, e.starts, e.gate_up);
  if (moe.swiglu_limit > 0) {
    run_cpu(ClampedSwiglu{e.gate_up, e.down_in, moe.swiglu_limit, moe.swiglu_alpha});
  } else {
    run_cpu(SiluMul{e.gate_up, e.down_in});
  }
  project(e.down_in, {}, moe.down, e.starts, e.out);
  run_cpu(
      CombineExperts{e.out, e.places, e.weights, shared ? OptionalTensor(a.delta) : OptionalTensor{}, scale, a.delta});
}

void run_mlp(const DecoderPass& op, size_t number, const Activations& a, const Adapters& adapters) {
  const Decoder& d = *op.decoder;
  const DecoderLayer& layer = d.layers[number];
  const bool dense = layer.gate_up.given();
  const TensorView& mlp_in = a.experts ? a.normed : adapters.rows(a.normed, a.mlp_in, layer.gate_up);
  run_cpu(RmsNorm{a.residual, a.delta, layer.mlp_norm, mlp_in, d.stream_eps()});
  if (dense) {
    adapters.project(mlp_in, a.mlp_in, layer.gate_up, &LoraLayer::gate_up, a.gate_up, a.lora_sums);
    const TensorView& down_in = adapters.rows(a.gated, a.down_in, layer.down);
    run_cpu(SiluMul{a.gate_up, down_in});
    adapters.project(down_in, a.down_in, layer.down, &LoraLayer::down, a.delta, a.lora_sums);
  }
  if (a.experts) run_experts(op, number, a, dense);
}

// Attention of a layer, or its keys and values alone.
void attend(const DecoderPass& op, const Activations& a, const DecoderLayer& layer, const KvCacheView& cache,
            bool only_cache) {
  const Decoder& d = *op.decoder;
  run_cpu(RopeCache{a.qkv, op.rope.cos, op.rope.sin, layer.q_norm, layer.k_norm, op.depths, cache, a.q, d.eps});
  if (only_cache) return;
  TensorView heads = a.attended;
  heads.ndim = 3, heads.shape[1] = d.heads, heads.shape[2] = d.head_dim, heads.strides[1] = d.head_dim,
  heads.strides[2] = 1;
  run_cpu(TreeAttention{a.q, cache, op.ancestors, heads, d.multipliers.attention, layer.window, true, {}, layer.sinks});
  if (layer.qkv.total_rows() > (d.heads + 2 * d.kv_heads) * d.head_dim) run_cpu(GateHeads{a.qkv, heads});
}

void run_cpu(const DecoderPass& op) {
  check_values(op);
  if (op.outputs.experts.defined()) std::fill_n(op.outputs.experts.as<int32_t>(), op.outputs.experts.numel(), 0);
  const Decoder& d = *op.decoder;
  const int64_t M = op.depths.shape[0];
  TensorView delta;  // the last block's addition to the residual; none yet
  Workspace first(op.workspace.as<uint8_t>());
  const TensorView residual = first.floats({M, d.hidden});  // residual and delta lie at the same place for every layer
  if (op.tokens.defined()) {
    run_cpu(GatherRows{d.embedding, op.tokens, residual});
  } else {
    copy_rows(op.inputs, residual);
  }
  multiply(residual, d.multipliers.embedding / d.multipliers.residual);
  int64_t state_layers = 0;  // so far
  for (size_t i = 0; i < d.layers.size(); ++i) {
    const DecoderLayer& layer = d.layers[i];
    Workspace space(op.workspace.as<uint8_t>());
    const Activations a(d, i, M, space);
    const KvCacheView cache = op.cache.layer(static_cast<int64_t>(i) - state_layers);
    const Adapters adapters(op, i);
    const TensorView& attention_in = adapters.rows(a.normed, a.attention_in, layer.qkv);
    if (layer.attention_norm.defined()) {
      run_cpu(RmsNorm{a.residual, delta, layer.attention_norm, attention_in, d.stream_eps()});
    } else if (op.adapters.defined()) {
      copy_rows(a.residual, attention_in);
    } else {
      const TensorView& from = d.first_columns > 0 ? op.first_inputs : a.residual;
      copy_rows(from, a.attention_in);
    }
    if (op.outputs.hidden_states.defined()) write_at_layer(op, a.residual, static_cast<int64_t>(i));
    adapters.project(attention_in, a.attention_in, layer.qkv, &LoraLayer::qkv, a.qkv, a.lora_sums);
    const bool last_of_cache = i + 1 == d.layers.size() && !op.outputs.hidden_states.defined();
    if (!layer.has_attention()) {
      const GatedDeltaLayer* gated = &layer.gated_delta[0];
      run_cpu(GatedDelta{a.qkv, gated, op.states, state_layers++, cache.row_start, op.ancestors, a.attended, d.eps});
    } else {
      attend(op, a, layer, cache, last_of_cache);
    }
    if (last_of_cache) return;
    adapters.project(a.attended, a.out_in, layer.attention_out, &LoraLayer::attention_out, a.delta, a.lora_sums);
    run_mlp(op, i, a, adapters);
    delta = a.delta;
  }
  run_cpu(RmsNorm{residual, delta, d.final_norm, op.outputs.hidden_states, d.stream_eps()});
  write_at_layer(op, residual, static_cast<int64_t>(d.layers.size()));
}

}  // namespace specengine
