#include "ops/draft_cascade.h"

#include <memory>
#include <numeric>

#include "drafting/level_children.h"
#include "ops/layer.h"

namespace specengine {
namespace {

// The tensors of the pass over M rows of F columns of hidden states.
struct PassRows {
  TensorView ones, states, embedded, normed, joined, fuse_in, fused, depths, hidden_states, at_layers, workspace;

  PassRows(const CascadeNetwork& network, int64_t M, int64_t F, Workspace& space)
      : PassRows(network.decoder, network, M, F, joined_columns(network, F), space) {}

  // Columns of the tensor that holds two inputs side by side.
  static int64_t joined_columns(const CascadeNetwork& network, int64_t F) {
    return network.reads_halves() ? network.decoder.first_columns : F + network.decoder.hidden;
  }

 private:
  PassRows(const Decoder& d, const CascadeNetwork& network, int64_t M, int64_t F, int64_t columns, Workspace& space)
      : ones(space.floats({d.hidden})),
        states(space.floats({M, F})),
        embedded(space.floats({M, d.hidden})),
        normed(space.floats({M, network.reads_halves() ? d.hidden : F})),
        joined(space.floats({M, columns})),
        fuse_in(space.rows(M, network.reads_halves() ? F : columns, network.fuse)),
        fused(space.floats({M, d.hidden})),
        depths(space.ints({M})),
        hidden_states(space.floats({M, d.hidden})),
        at_layers(space.floats({M, static_cast<int64_t>(d.layers.size()), d.hidden})),
        workspace(space.bytes(d.workspace_bytes(M))) {}
};

// The tensors of T levels of B requests; their rows lie level by level.
struct LevelRows {
  TensorView outputs, head_in, logits;
  TensorView above, markov_rows, markov_in, added;  // of one level: the likeliest tokens above, what they add

  LevelRows(const CascadeNetwork& network, int64_t B, int64_t T, Workspace& space)
      : outputs(space.floats({T * B, network.decoder.hidden})),
        head_in(space.rows(T * B, network.decoder.hidden, network.head)),
        logits(space.floats({T * B, network.head.total_rows()})) {
    if (network.markov_rank == 0) return;
    above = space.ints({B}), markov_rows = space.floats({B, network.markov_rank});
    markov_in = space.rows(B, network.markov_rank, network.markov_head);
    added = space.floats({B, network.head.total_rows()});
  }
};

void join(const TensorView& left, const TensorView& right, const TensorView& out) {
  const int64_t L = left.shape[1], R = right.shape[1];
  for (int64_t m = 0; m < out.shape[0]; ++m) {
    std::copy_n(left.as<float>() + m * L, L, out.as<float>() + m * (L + R));
    std::copy_n(right.as<float>() + m * R, R, out.as<float>() + m * (L + R) + L);
  }
}

// Makes `fused`, the rows that enter the first layer, and where it reads halves, `joined`, from which it makes q, k, v.
void fuse(const DraftCascade& op, const PassRows& rows) {
  const CascadeNetwork& network = *op.network;
  const Decoder& d = network.decoder;
  const TensorView none;
  const int64_t F = rows.states.shape[1];
  for (int64_t m = 0; m < op.tokens.shape[0]; ++m) {
    std::copy_n(op.hidden_states.as<float>() + op.rows.as<int32_t>()[m] * F, F, rows.states.as<float>() + m * F);
  }
  run_cpu(GatherRows{network.embedding, op.tokens, rows.embedded});
  if (network.reads_halves()) {
    prepare_rows(rows.states, network.fuse, rows.fuse_in);
    project(rows.fuse_in, network.fuse, rows.fused);
    run_cpu(RmsNorm{rows.embedded, none, network.embedding_norm, rows.embedded, d.eps});
    run_cpu(RmsNorm{rows.fused, none, network.hidden_state_norm, rows.normed, d.eps});
    return join(rows.embedded, rows.normed, rows.joined);
  }
  const auto states = [&](const TensorView& x) { return tensor(x.data, x.dtype, {x.numel() / d.hidden, d.hidden}); };
  run_cpu(RmsNorm{states(rows.states), none, rows.ones, states(rows.normed), d.eps});
  join(rows.normed, rows.embedded, rows.joined);
  prepare_rows(rows.joined, network.fuse, rows.fuse_in);
  project(rows.fuse_in, network.fuse, rows.fused);
}

// Adds to a level's logits what the likeliest tokens of the level above say.
void add_markov(const CascadeNetwork& network, const LevelRows& own, const LevelChildren& best,
                const TensorView& logits) {
  for (int64_t b = 0; b < logits.shape[0]; ++b) own.above.as<int32_t>()[b] = best.token(b, 0);
  run_cpu(GatherRows{network.markov_tokens, own.above, own.markov_rows});
  prepare_rows(own.markov_rows, network.markov_head, own.markov_in);
  project(own.markov_in, network.markov_head, own.added);
  for (int64_t i = 0; i < logits.numel(); ++i) logits.as<float>()[i] += own.added.as<float>()[i];
}

// Checks values before anything is written.
void check_values(const DraftCascade& op) {
  const KvCacheView cache = op.cache.layer(0);
  cache.validate_rows(op.tokens.shape[0]);
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  for (int64_t b = 0; b < cache.requests(); ++b) {
    if (row_start[b + 1] == row_start[b]) fail("row_start: request ", b, " has no pair");
    const int64_t last = op.cache.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b] - 1;
    if (last >= op.cos.shape[0]) fail("lengths: position ", last, " is past the ", op.cos.shape[0], " rows of cos");
  }
  check_ids(op.tokens, "tokens", op.network->embedding.shape[0] * kPanel);
  check_ids(op.rows, "rows", op.hidden_states.shape[0]);
}

}  // namespace

void CascadeNetwork::validate() const {
  Checker check;
  const Decoder& d = decoder;
  std::vector<int64_t> outputs(d.layers.size());
  std::iota(outputs.begin(), outputs.end(), 1);
  if (d.hidden_state_layers != outputs) fail("decoder: expected every layer's output as its hidden_state_layers");
  if (reads_halves() && d.first_columns != 2 * d.hidden) {
    fail("decoder: expected first_columns=0 or ", 2 * d.hidden, ", got ", d.first_columns);
  }
  Dim V{"V"}, R{"R"}, C{"C", d.hidden, "hidden"}, rank{"r", markov_rank, "markov_rank"};
  check_weight(check, embedding, "embedding", V, C);
  if (reads_halves()) {
    check(embedding_norm, "embedding_norm", {DType::kFloat32}, {d.hidden});
    check(hidden_state_norm, "hidden_state_norm", {DType::kFloat32}, {d.hidden});
  } else if (embedding_norm.given() || hidden_state_norm.given()) {
    fail("embedding_norm: expected no norms where the first layer reads one row");
  }
  if (fuse.weights.empty() || fuse.total_rows() != d.hidden) fail("fuse: expected ", d.hidden, " rows");
  check.optional(head_norm, "head_norm", {DType::kFloat32}, {d.hidden});
  check_projection(check, head, "head", head.total_rows(), d.hidden);
  if (markov_rank < 0) fail("markov_rank: expected 0 or more, got ", markov_rank);
  if (markov_rank == 0 && (markov_tokens.given() || !markov_head.weights.empty())) {
    fail("markov_rank: expected columns of markov_tokens, got 0");
  }
  if (markov_rank > 0) {
    check_weight(check, markov_tokens, "markov_tokens", R, rank);
    if (R * kPanel < head.total_rows()) fail("markov_tokens: expected ", head.total_rows(), " rows");
    check_projection(check, markov_head, "markov_head", head.total_rows(), markov_rank);
  }
  check.optional(vocabulary, "vocabulary", {DType::kInt32}, {head.total_rows()});
  if (check.device() != Device::kCpu) fail("embedding: expected a tensor on cpu, got ", name_of(check.device()));
  if (vocabulary.defined()) check_ids(vocabulary, "vocabulary", embedding.shape[0] * kPanel);
}

Device DraftCascade::validate() const {
  Checker check;
  const Decoder& d = network->decoder;
  const int64_t layers = static_cast<int64_t>(d.layers.size());
  Dim M{"M"}, R{"R"}, states{"states"}, B{"B"}, T{"T"}, k{"k"}, positions{"positions"};
  check(tokens, "tokens", {DType::kInt32}, {M});
  check(hidden_states, "hidden_states", {DType::kFloat32}, {R, states, d.hidden});
  check(rows, "rows", {DType::kInt32}, {M});
  const int64_t embeddings = network->reads_halves() ? 0 : 1;
  check_projection(check, network->fuse, "fuse", d.hidden, (states + embeddings) * d.hidden);
  cache.validate(check, layers, d.kv_heads, d.head_dim);
  B.value = cache.requests(), B.bound_by = "lengths";
  check(cos, "cos", {DType::kFloat32}, {positions, d.head_dim / 2});
  check(sin, "sin", {DType::kFloat32}, {positions, d.head_dim / 2});
  WrittenLevels{children, scores, {}}.validate(check, B, T, k, network->head.total_rows());
  if (T > layers) fail("children: expected at most ", layers, " levels, one per layer, got ", T.value);
  return check.device();
}

void run_cpu(const DraftCascade& op) {
  check_values(op);
  const CascadeNetwork& network = *op.network;
  const Decoder& d = network.decoder;
  const int64_t M = op.tokens.shape[0], F = op.hidden_states.shape[1] * d.hidden;
  const int64_t B = op.cache.lengths.shape[0], T = op.children.shape[1], k = op.children.shape[2];
  const int64_t layers = static_cast<int64_t>(d.layers.size());
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  const TensorView none;

  Workspace count(nullptr);
  PassRows(network, M, F, count), LevelRows(network, B, T, count), LevelChildren(T * B, k, count);
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[count.used() + 64]);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  Workspace space(memory.get() + (64 - address % 64));
  const PassRows rows(network, M, F, space);
  const LevelRows own(network, B, T, space);
  const LevelChildren best(T * B, k, space);
  std::fill_n(rows.ones.as<float>(), d.hidden, 1.0f);
  for (int64_t b = 0; b < B; ++b) {
    std::iota(rows.depths.as<int32_t>() + row_start[b], rows.depths.as<int32_t>() + row_start[b + 1], 0);
  }

  fuse(op, rows);
  run_cpu(DecoderPass{&d,
                      none,
                      rows.fused,
                      network.reads_halves() ? OptionalTensor(rows.joined) : OptionalTensor(),
                      rows.depths,
                      none,
                      op.cache,
                      {op.cos, op.sin},
                      {rows.hidden_states, rows.at_layers},
                      rows.workspace});
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t b = 0; b < B; ++b) {
      const float* last = rows.at_layers.as<float>() + ((row_start[b + 1] - 1) * layers + t) * d.hidden;
      std::copy_n(last, d.hidden, own.outputs.as<float>() + (t * B + b) * d.hidden);
    }
  }
  if (network.head_norm.defined()) {
    run_cpu(RmsNorm{own.outputs, none, network.head_norm, own.head_in, d.eps});
  } else {
    prepare_rows(own.outputs, network.head, own.head_in);
  }
  project(own.head_in, network.head, own.logits);
  const WrittenLevels to{op.children, op.scores, network.vocabulary};
  if (network.markov_rank == 0) return best.write(own.logits, to, 0);
  for (int64_t t = 0; t < T; ++t) {
    const TensorView logits = rows_of(own.logits, t * B, B);
    if (t > 0) add_markov(network, own, best, logits);
    best.write(logits, to, t);
  }
}

}  // namespace specengine
