#include "ops/draft_glide.h"

#include <cmath>
#include <memory>
#include <numeric>

#include "drafting/level_children.h"
#include "ops/layer.h"
#include "ops/tree_attention.h"

namespace specengine {
namespace {

// The tensors of a pass over M rows.
struct PassRows {
  TensorView tokens, depths, row_start, lengths;                  // the rows of a level; the first pass has its own
  TensorView x, delta, qkv, q, attended, gate_up, states, input;  // input: room for rows in any projection's form
  TensorView query, read, table, seen, single;                    // of the target's cache: every row is a request there

  PassRows(const DraftGlide& op, int64_t M, int64_t B, Workspace& space)
      : PassRows(*op.network, op.network->decoder, M, B, op.cache.block_table.shape[1], space) {}

  // Brings `from` to the form that the reader multiplies, until the next call.
  TensorView input_of(const Projection& reader, const TensorView& from) const {
    const TensorView out = room_for(reader, from);
    prepare_rows(from, reader, out);
    return out;
  }
  TensorView room_for(const Projection& reader, const TensorView& from) const {
    Workspace space(input.as<uint8_t>());
    return space.rows(from.shape[0], from.shape[1], reader);
  }

 private:
  PassRows(const GlideNetwork& n, const Decoder& d, int64_t M, int64_t B, int64_t pages, Workspace& space)
      : tokens(space.ints({M})),
        depths(space.ints({M})),
        row_start(space.ints({B + 1})),
        lengths(space.ints({B})),
        x(space.floats({M, d.hidden})),
        delta(space.floats({M, d.hidden})),
        qkv(space.floats({M, (d.heads + 2 * d.kv_heads) * d.head_dim})),
        q(space.floats({M, d.heads, d.head_dim})),
        attended(space.floats({M, d.heads, d.head_dim})),
        gate_up(space.floats({M, 2 * d.intermediate})),
        states(space.floats({M, d.hidden})),
        input(space.floats({M, widest(n) + kBlock})),
        query(space.floats({M, n.target_heads, n.target_head_dim})),
        read(space.floats({M, n.target_heads, n.target_head_dim})),
        table(space.ints({M, pages})),
        seen(space.ints({M})),
        single(space.ints({M + 1})) {}

  static int64_t widest(const GlideNetwork& n) {
    const Decoder& d = n.decoder;
    return std::max({d.hidden, d.heads * d.head_dim, d.intermediate, n.target_heads * n.target_head_dim});
  }
};

// The chains of a pass: which rows belong to which request, and where their keys and values go.
struct Chains {
  TensorView tokens, lengths, row_start;
};

// One row per request.
struct PerRequest {
  TensorView last, head_in, logits;

  PerRequest(const GlideNetwork& n, int64_t B, Workspace& space)
      : last(space.floats({B, n.decoder.hidden})),
        head_in(space.rows(B, n.decoder.hidden, n.head)),
        logits(space.floats({B, n.head.total_rows()})) {}
};

// Fills depths, and what each row sees of the target's cache.
void place(const DraftGlide& op, const PassRows& rows, const Chains& chains) {
  const int64_t pages = op.cache.block_table.shape[1], block = op.network->block;
  const int32_t* row_start = chains.row_start.as<int32_t>();
  for (int64_t b = 0; b < op.cache.requests(); ++b) {
    const int64_t verified = op.target.lengths.as<int32_t>()[b];
    for (int64_t m = row_start[b]; m < row_start[b + 1]; ++m) {
      const int64_t depth = m - row_start[b], position = chains.lengths.as<int32_t>()[b] + depth;
      const int64_t trained = position < block ? position + 1 : position / block * block;
      const int64_t visible = position < verified ? trained : verified;
      rows.depths.as<int32_t>()[m] = static_cast<int32_t>(depth);
      rows.seen.as<int32_t>()[m] = static_cast<int32_t>(std::max<int64_t>(0, visible - 1));  // and its own slot
      std::copy_n(op.cache.block_table.as<int32_t>() + b * pages, pages, rows.table.as<int32_t>() + m * pages);
    }
  }
  std::iota(rows.single.as<int32_t>(), rows.single.as<int32_t>() + rows.single.shape[0], 0);
}

// Rotates queries [M, heads, D] to the positions of their rows.
void rotate(const DraftGlide& op, const PassRows& rows, const Chains& chains) {
  const int64_t heads = rows.query.shape[1], half = rows.query.shape[2] / 2;
  const int32_t* row_start = chains.row_start.as<int32_t>();
  for (int64_t m = 0; m < rows.query.shape[0]; ++m) {
    const int64_t b = request_of(row_start, m), position = chains.lengths.as<int32_t>()[b] + m - row_start[b];
    const float *cos = op.target_cos.as<float>() + position * half, *sin = op.target_sin.as<float>() + position * half;
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
void read_target(const DraftGlide& op, const PassRows& rows, const Chains& chains, size_t layer) {
  const GlideNetwork& n = *op.network;
  for (int64_t i = 0; i < rows.x.numel(); ++i) rows.x.as<float>()[i] += rows.delta.as<float>()[i];  // no norm before it
  project(rows.input_of(n.queries[layer], rows.x), n.queries[layer], as_rows(rows.query));
  rotate(op, rows, chains);
  const int64_t which = op.target.k_cache.shape[0] - static_cast<int64_t>(n.decoder.layers.size() - layer);
  const KvCacheView all{op.target.k_cache, op.target.v_cache, rows.table, rows.seen, rows.single, 0};
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n.target_head_dim)));
  run_cpu(TreeAttention{rows.query, all.layer(which), {}, rows.read, scale, n.reach, true, {}});
  project(rows.input_of(n.outs[layer], as_rows(rows.read)), n.outs[layer], rows.delta);
}

// Runs all layers; writes states after the final norm.
void pass(const DraftGlide& op, const PassRows& rows, const Chains& chains) {
  const GlideNetwork& n = *op.network;
  const Decoder& d = n.decoder;
  place(op, rows, chains);
  for (int64_t m = 0; m < chains.tokens.shape[0]; ++m) {
    const int32_t token = chains.tokens.as<int32_t>()[m];
    rows.tokens.as<int32_t>()[m] = token < n.embedding_rows ? token : 0;
  }
  run_cpu(GatherRows{n.embedding, rows.tokens, rows.x});
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d.head_dim)));
  OptionalTensor delta;  // none yet
  for (size_t i = 0; i < d.layers.size(); ++i) {
    const DecoderLayer& layer = d.layers[i];
    const KvCacheView all{op.cache.k_cache, op.cache.v_cache, op.cache.block_table,
                          chains.lengths,   chains.row_start, 0};
    const KvCacheView cache = all.layer(static_cast<int64_t>(i));
    const TensorView attention_in = rows.room_for(layer.qkv, rows.x);
    run_cpu(RmsNorm{rows.x, delta, layer.attention_norm, attention_in, d.eps});
    project(attention_in, layer.qkv, rows.qkv);
    run_cpu(RopeCache{rows.qkv, op.cos, op.sin, layer.q_norm, layer.k_norm, rows.depths, cache, rows.q, d.eps});
    run_cpu(TreeAttention{rows.q, cache, {}, rows.attended, scale, layer.window, true, {}, layer.sinks});
    project(rows.input_of(layer.attention_out, as_rows(rows.attended)), layer.attention_out, rows.delta);
    if (n.reads_target()) read_target(op, rows, chains, i);
    const TensorView mlp_in = rows.room_for(layer.gate_up, rows.x);
    run_cpu(RmsNorm{rows.x, rows.delta, layer.mlp_norm, mlp_in, d.eps});
    project(mlp_in, layer.gate_up, rows.gate_up);
    const TensorView gated = tensor(nullptr, DType::kFloat32, {rows.x.shape[0], d.intermediate});
    const TensorView down_in = rows.room_for(layer.down, gated);
    run_cpu(SiluMul{rows.gate_up, down_in});
    project(down_in, layer.down, rows.delta);
    delta = rows.delta;
  }
  run_cpu(RmsNorm{rows.x, delta, d.final_norm, rows.states, d.eps});
}

// The tokens that another level is expected to add, the sum over the requests.
double expected_tokens(const DraftGlide& op, int64_t level) {
  const int64_t T = op.children.shape[1], k = op.children.shape[2];
  double tokens = 0;
  for (int64_t b = 0; b < op.children.shape[0]; ++b) {
    float score = 0;
    for (int64_t t = 0; t < level; ++t) score += op.scores.as<float>()[(b * T + t) * k];
    const double reached = std::exp(score), depth = static_cast<double>(level);
    tokens += std::pow(reached, 1 + 1 / depth);
  }
  return tokens;
}

// Checks values for all levels before anything is written.
void check_values(const DraftGlide& op) {
  const int64_t T = op.children.shape[1];
  KvCacheView cache = op.cache.layer(0);
  cache.first_node = T - 1;
  cache.validate_rows(op.tokens.shape[0]);
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  for (int64_t b = 0; b < cache.requests(); ++b) {
    if (row_start[b + 1] == row_start[b]) fail("row_start: request ", b, " has no token");
    const int64_t length = op.cache.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b], last = length + T - 2;
    const int32_t verified = op.target.lengths.as<int32_t>()[b];
    if (verified != length - 1 || verified < 1) {
      fail("verified: entry ", b, " is ", verified, ", expected all ", length, " tokens but the root");
    }
    for (const auto& [table, name] : {std::pair(op.cos, "cos"), std::pair(op.target_cos, "target_cos")}) {
      if (last >= table.shape[0]) {
        fail("lengths: position ", last, " is past the ", table.shape[0], " rows of ", name);
      }
    }
  }
  for (int64_t m = 0; m < op.tokens.shape[0]; ++m) {
    if (op.tokens.as<int32_t>()[m] < 0)
      fail("tokens: entry ", m, " is ", op.tokens.as<int32_t>()[m], ", expected 0 or more");
  }
}

}  // namespace

void GlideNetwork::validate() const {
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

Device DraftGlide::validate() const {
  Checker check;
  const Decoder& d = network->decoder;
  const int64_t layers = static_cast<int64_t>(d.layers.size()), D = network->target_head_dim;
  Dim M{"M"}, B{"B"}, T{"T"}, k{"k"}, positions{"positions"}, theirs{"positions"}, L{"layers"}, K{"K"};
  check(tokens, "tokens", {DType::kInt32}, {M});
  cache.validate(check, layers, d.kv_heads, d.head_dim);
  B.value = cache.requests(), B.bound_by = "lengths";
  check(target.k_cache, "target_k", {DType::kFloat32, DType::kBFloat16, DType::kFloat16},
        {L, cache.k_cache.shape[1], K, kPageSize, D});
  check(target.lengths, "verified", {DType::kInt32}, {B});
  check(target.v_cache, "target_v", {target.k_cache.dtype}, {L, cache.k_cache.shape[1], K, kPageSize, D});
  if (L < layers) fail("target_k: expected at least ", layers, " layers, got ", L.value);
  if (K < 1 || network->target_heads % K != 0 || network->target_heads / K > TreeAttention::kMaxGroup) {
    fail("target_k: ", network->target_heads, " query heads do not divide among K=", K.value);
  }
  check(cos, "cos", {DType::kFloat32}, {positions, d.head_dim / 2});
  check(sin, "sin", {DType::kFloat32}, {positions, d.head_dim / 2});
  check(target_cos, "target_cos", {DType::kFloat32}, {theirs, D / 2});
  check(target_sin, "target_sin", {DType::kFloat32}, {theirs, D / 2});
  WrittenLevels{children, scores, {}}.validate(check, B, T, k, network->head.total_rows());
  check(levels, "levels", {DType::kInt32}, {B});
  return check.device();
}

void run_cpu(const DraftGlide& op) {
  check_values(op);
  const GlideNetwork& network = *op.network;
  const int64_t C = network.decoder.hidden;
  const int64_t M = op.tokens.shape[0], B = op.children.shape[0], T = op.children.shape[1], k = op.children.shape[2];
  const int32_t* row_start = op.cache.row_start.as<int32_t>();

  Workspace count(nullptr);
  PerRequest(network, B, count), LevelChildren(B, k, count), PassRows(op, B, B, count), PassRows(op, M, B, count);
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[count.used() + 64]);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  Workspace space(memory.get() + (64 - address % 64));
  const PerRequest own(network, B, space);
  const LevelChildren best(B, k, space);
  const PassRows rows(op, B, B, space), first(op, M, B, space);

  const auto expand = [&](int64_t level) {
    prepare_rows(own.last, network.head, own.head_in);
    project(own.head_in, network.head, own.logits);
    best.write(own.logits, {op.children, op.scores, network.vocabulary}, level, "tokens");
  };
  pass(op, first, {op.tokens, op.cache.lengths, op.cache.row_start});
  for (int64_t b = 0; b < B; ++b) {
    std::copy_n(first.states.as<float>() + (row_start[b + 1] - 1) * C, C, own.last.as<float>() + b * C);
    rows.lengths.as<int32_t>()[b] = op.cache.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b];
  }
  std::iota(rows.row_start.as<int32_t>(), rows.row_start.as<int32_t>() + B + 1, 0);
  expand(0);
  int64_t level = 1;
  for (; level < T; ++level) {
    if (expected_tokens(op, level) < op.min_level_tokens) break;
    for (int64_t b = 0; b < B; ++b) rows.tokens.as<int32_t>()[b] = op.children.as<int32_t>()[(b * T + level - 1) * k];
    pass(op, rows, {rows.tokens, rows.lengths, rows.row_start});
    std::copy_n(rows.states.as<float>(), B * C, own.last.as<float>());
    for (int64_t b = 0; b < B; ++b) ++rows.lengths.as<int32_t>()[b];
    expand(level);
  }
  std::fill_n(op.levels.as<int32_t>(), B, static_cast<int32_t>(level));
}

}  // namespace specengine
