#include "networks/glide.h"

#include <cmath>
#include <numeric>

#include "ops/layer.h"
#include "ops/tree_attention.h"

namespace specengine {
namespace {

// The tensors of a pass over M rows.
struct PassRows {
  TensorView tokens, depths, lengths;  // of a level; the first pass has its own lengths
  TensorView x, delta, qkv, q, attended, gate_up, states;
  TensorView query, read, table, seen, single;  // of the target's cache: every row is a request there

  PassRows(const GlideWeights& n, const DraftInputs& in, int64_t M, Scratch& space)
      : PassRows(n, n.decoder, M, in.requests(), in.block_table.shape[1], space) {}

 private:
  PassRows(const GlideWeights& n, const Decoder& d, int64_t M, int64_t B, int64_t pages, Scratch& space)
      : tokens(space.ints({M})),
        depths(space.ints({M})),
        lengths(space.ints({B})),
        x(space.floats({M, d.hidden})),
        delta(space.floats({M, d.hidden})),
        qkv(space.floats({M, (d.heads + 2 * d.kv_heads) * d.head_dim})),
        q(space.floats({M, d.heads, d.head_dim})),
        attended(space.floats({M, d.heads, d.head_dim})),
        gate_up(space.floats({M, 2 * d.intermediate})),
        states(space.floats({M, d.hidden})),
        query(space.floats({M, n.target_heads, n.target_head_dim})),
        read(space.floats({M, n.target_heads, n.target_head_dim})),
        table(space.ints({M, pages})),
        seen(space.ints({M})),
        single(space.ints({M + 1})) {}
};

// The chains of a pass: which rows belong to which request, and where their keys and values go.
struct Chains {
  TensorView tokens, lengths, row_start;
};

class GlideNetwork final : public Network {
 public:
  GlideNetwork(const GlideWeights& weights, const DraftInputs& inputs)
      : w_(weights),
        in_(inputs),
        chains_(w_, in_, in_.tokens.shape[0], own_),
        level_(w_, in_, in_.requests(), own_),
        last_(own_.floats({in_.requests(), w_.decoder.hidden})),
        logits_(own_.floats({in_.requests(), w_.head.total_rows()})) {}

  TensorView begin() override {
    pass(chains_, {in_.tokens, in_.lengths, in_.row_start});
    take_rows(chains_.states, in_.last.as<int32_t>(), last_);
    std::copy_n(in_.ends.as<int32_t>(), in_.requests(), level_.lengths.as<int32_t>());
    return logits(last_);
  }

  TensorView step(const LevelRows& rows) override {
    pass(level_, {rows.tokens, level_.lengths, rows.row_start});
    for (int64_t b = 0; b < in_.requests(); ++b) ++level_.lengths.as<int32_t>()[b];
    return logits(level_.states);
  }

 private:
  TensorView logits(const TensorView& states) const {
    multiply(states, w_.head, logits_);
    return logits_;
  }

  // Fills depths, and what each row sees of the target's cache.
  void place(const PassRows& rows, const Chains& chains) const {
    const int64_t pages = in_.block_table.shape[1], block = w_.block;
    const int32_t* row_start = chains.row_start.as<int32_t>();
    for (int64_t b = 0; b < in_.requests(); ++b) {
      const int64_t verified = in_.ends.as<int32_t>()[b] - 1;
      for (int64_t m = row_start[b]; m < row_start[b + 1]; ++m) {
        const int64_t depth = m - row_start[b], position = chains.lengths.as<int32_t>()[b] + depth;
        const int64_t trained = position < block ? position + 1 : position / block * block;
        const int64_t visible = position < verified ? trained : verified;
        rows.depths.as<int32_t>()[m] = static_cast<int32_t>(depth);
        rows.seen.as<int32_t>()[m] = static_cast<int32_t>(std::max<int64_t>(0, visible - 1));  // and its own slot
        std::copy_n(in_.block_table.as<int32_t>() + b * pages, pages, rows.table.as<int32_t>() + m * pages);
      }
    }
    std::iota(rows.single.as<int32_t>(), rows.single.as<int32_t>() + rows.single.shape[0], 0);
  }

  // Rotates queries [M, heads, D] to the positions of their rows.
  void rotate(const PassRows& rows, const Chains& chains) const {
    const CacheTensors& target = in_.caches[1];
    const int64_t heads = rows.query.shape[1], half = rows.query.shape[2] / 2;
    const int32_t* row_start = chains.row_start.as<int32_t>();
    for (int64_t m = 0; m < rows.query.shape[0]; ++m) {
      const int64_t b = request_of(row_start, m), position = chains.lengths.as<int32_t>()[b] + m - row_start[b];
      const float *cos = target.cos.as<float>() + position * half, *sin = target.sin.as<float>() + position * half;
      for (int64_t h = 0; h < heads; ++h) {
        float* x = rows.query.as<float>() + (m * heads + h) * 2 * half;
        for (int64_t i = 0; i < half; ++i) {
          const float a = x[i], c = x[i + half];
          x[i] = a * cos[i] - c * sin[i], x[i + half] = c * cos[i] + a * sin[i];
        }
      }
    }
  }

  // Adds delta to x and writes what attention to the target's cache adds to delta.
  void read_target(const PassRows& rows, const Chains& chains, size_t layer) const {
    for (int64_t i = 0; i < rows.x.numel(); ++i)
      rows.x.as<float>()[i] += rows.delta.as<float>()[i];  // no norm before it
    multiply(rows.x, w_.queries[layer], as_rows(rows.query));
    rotate(rows, chains);
    const CacheTensors& target = in_.caches[1];
    const int64_t which = target.k.shape[0] - static_cast<int64_t>(w_.decoder.layers.size() - layer);
    const KvCacheView all{target.k, target.v, rows.table, rows.seen, rows.single, 0};
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(w_.target_head_dim)));
    run_cpu(TreeAttention{rows.query, all.layer(which), {}, rows.read, scale, w_.reach, true, {}});
    multiply(as_rows(rows.read), w_.outs[layer], rows.delta);
  }

  // Runs all layers; writes states after the final norm.
  void pass(const PassRows& rows, const Chains& chains) const {
    const Decoder& d = w_.decoder;
    place(rows, chains);
    for (int64_t m = 0; m < chains.tokens.shape[0]; ++m) {
      const int32_t token = chains.tokens.as<int32_t>()[m];
      rows.tokens.as<int32_t>()[m] = token < w_.embedding_rows ? token : 0;
    }
    run_cpu(GatherRows{w_.embedding, rows.tokens, rows.x});
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d.head_dim)));
    const CacheTensors& own = in_.caches[0];
    const KvCacheView all{own.k, own.v, in_.block_table, chains.lengths, chains.row_start, 0};
    OptionalTensor delta;  // none yet
    for (size_t i = 0; i < d.layers.size(); ++i) {
      const DecoderLayer& layer = d.layers[i];
      const KvCacheView cache = all.layer(static_cast<int64_t>(i));
      Scratch own_rows;  // in the forms of projections
      const int64_t M = rows.x.shape[0];
      const TensorView attention_in = own_rows.rows(M, d.hidden, layer.qkv);
      run_cpu(RmsNorm{rows.x, delta, layer.attention_norm, attention_in, d.eps});
      project(attention_in, layer.qkv, rows.qkv);
      run_cpu(RopeCache{rows.qkv, own.cos, own.sin, layer.q_norm, layer.k_norm, rows.depths, cache, rows.q, d.eps});
      run_cpu(TreeAttention{rows.q, cache, {}, rows.attended, scale, layer.window, true, {}, layer.sinks});
      multiply(as_rows(rows.attended), layer.attention_out, rows.delta);
      if (w_.reads_target()) read_target(rows, chains, i);
      const TensorView mlp_in = own_rows.rows(M, d.hidden, layer.gate_up);
      run_cpu(RmsNorm{rows.x, rows.delta, layer.mlp_norm, mlp_in, d.eps});
      project(mlp_in, layer.gate_up, rows.gate_up);
      const TensorView down_in = own_rows.rows(M, d.intermediate, layer.down);
      run_cpu(SiluMul{rows.gate_up, down_in});
      project(down_in, layer.down, rows.delta);
      delta = rows.delta;
    }
    run_cpu(RmsNorm{rows.x, delta, d.final_norm, rows.states, d.eps});
  }

  const GlideWeights& w_;
  const DraftInputs& in_;
  Scratch own_;
  PassRows chains_, level_;
  TensorView last_, logits_;  // one row per request
};

// Checks the target's cache and tables.
void check_target(Checker& check, const GlideWeights& w, const DraftInputs& in, int64_t further) {
  const int64_t layers = static_cast<int64_t>(w.decoder.layers.size()), D = w.target_head_dim;
  const CacheTensors &own = in.caches[0], &target = in.caches[1];
  Dim positions{"positions"}, L{"layers"}, K{"K"};
  check(target.k, "target's k_cache", {DType::kFloat32, DType::kBFloat16, DType::kFloat16},
        {L, own.k.shape[1], K, kPageSize, D});
  check(target.v, "target's v_cache", {target.k.dtype}, {L, own.k.shape[1], K, kPageSize, D});
  if (L < layers) fail("target's k_cache: expected at least ", layers, " layers, got ", L.value);
  if (K < 1 || w.target_heads % K != 0 || w.target_heads / K > TreeAttention::kMaxGroup) {
    fail("target's k_cache: ", w.target_heads, " query heads do not divide among K=", K.value);
  }
  check(target.cos, "target's cos", {DType::kFloat32}, {positions, D / 2});
  check(target.sin, "target's sin", {DType::kFloat32}, {positions, D / 2});
  for (int64_t b = 0; b < in.requests(); ++b) {
    const int64_t end = in.ends.as<int32_t>()[b], deepest = end - 1 + further;
    if (end < 2) fail("cached: request ", b, " has its root alone, the target's cache needs a token before it");
    if (deepest >= positions)
      fail("cached: position ", deepest, " is past the ", positions.value, " rows of target's cos");
  }
}

}  // namespace

void GlideWeights::validate() const {
  Checker check;
  const Decoder& d = decoder;
  if (d.first_columns != 0 || !d.hidden_state_layers.empty()) {
    fail("decoder: expected one without first_columns and hidden_state_layers");
  }
  if (!d.layers[0].attention_norm.given()) fail("decoder: expected a norm before every attention");
  Dim V{"V"}, C{"C", d.hidden, "hidden"};
  check_weight(check, embedding, "embedding", V, C);
  if (embedding_rows < 1 || embedding_rows > V * kPanel) {
    fail("embedding_rows: expected 1 to ", V * kPanel, ", got ", embedding_rows);
  }
  if (queries.size() != outs.size() || (!queries.empty() && queries.size() != d.layers.size())) {
    fail("queries: expected one of each layer, as of outs, or none");
  }
  constexpr int64_t kMost = 1 << 24;
  if (target_heads < 1 || target_heads > kMost) fail("target_heads: expected 1 to ", kMost, ", got ", target_heads);
  if (target_head_dim < 2 || target_head_dim > kMost || target_head_dim % 2 != 0) {
    fail("target_head_dim: expected an even number from 2 to ", kMost, ", got ", target_head_dim);
  }
  for (size_t i = 0; i < queries.size(); ++i) {
    check_projection(check, queries[i], "queries", target_heads * target_head_dim, d.hidden);
    check_projection(check, outs[i], "outs", d.hidden, target_heads * target_head_dim);
  }
  if (reach < 0) fail("reach: expected 0 (all) or a positive number of keys, got ", reach);
  if (block < 1) fail("block: expected a positive number of tokens, got ", block);
  check_projection(check, head, "head", head.total_rows(), d.hidden);
  check.optional(vocabulary, "vocabulary", {DType::kInt32}, {head.total_rows()});
  if (check.device() != Device::kCpu) fail("embedding: expected a tensor on cpu, got ", name_of(check.device()));
  if (vocabulary.defined()) check_ids(vocabulary, "vocabulary", INT32_MAX);
}

std::unique_ptr<Network> open_network(const GlideWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes) {
  Checker check;
  if (inputs.hidden_states.given()) fail("hidden_states: expected None");
  if (sizes.beam > 1) fail("beam: expected 1 of a network that reads chains, got ", sizes.beam);
  check_children(sizes, weights.head.total_rows());
  inputs.check_chains(check, weights.decoder, INT32_MAX, sizes.levels - 1, sizes.levels - 1, true);
  check_target(check, weights, inputs, sizes.levels - 1);
  return std::make_unique<GlideNetwork>(weights, inputs);
}

}  // namespace specengine
