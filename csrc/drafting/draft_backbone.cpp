#include "ops/draft_backbone.h"

#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "cpu/passes/workspace.h"
#include "ops/expand_backbone.h"
#include "ops/layer.h"

namespace specengine {
namespace {

// The tensors of a pass of M rows.
struct PassRows {
  TensorView embedded, normed_embedded, normed, first_inputs, hidden_states, at_layers, workspace;

  PassRows(const Decoder& d, int64_t M, Workspace& space)
      : embedded(space.floats({M, d.hidden})),
        normed_embedded(space.floats({M, d.hidden})),
        normed(space.floats({M, d.hidden})),
        first_inputs(space.floats({M, 2 * d.hidden})),
        hidden_states(space.floats({M, d.hidden})),
        at_layers(space.floats({M, 1, d.hidden})),
        workspace(space.bytes(d.workspace_bytes(M))) {}
};

// The tensors of the first pass alone: its input, the fused hidden states, depths.
struct FirstRows {
  TensorView given, fused, depths;

  FirstRows(const DraftBackbone& op, int64_t M, Workspace& space) : depths(space.ints({M})) {
    if (!op.network->fuses()) return;
    given = space.rows(M, op.hidden_states.shape[1], op.network->fuse),
    fused = space.floats({M, op.network->decoder.hidden});
  }
};

// One row per request.
struct PerRequest {
  TensorView read, fed;  // the last row's outputs: read by the head, fed to the next level
  TensorView head_in, logits;
  TensorView tokens, depths, row_start, lengths;  // inputs of the next level
  TensorView root, thresholds, widths, tree_tokens, parents, tree_depths, scores, ancestors, counts, top_tokens,
      top_scores, sums, arrived;  // of expand_backbone

  PerRequest(const DraftBackbone& op, int64_t B, int64_t k, Workspace& space)
      : read(space.floats({B, op.network->decoder.hidden})),
        fed(space.floats({B, op.network->decoder.hidden})),
        head_in(space.rows(B, op.network->decoder.hidden, op.network->head)),
        logits(space.floats({B, 1, op.network->head.total_rows()})),
        tokens(space.ints({B})),
        depths(space.ints({B})),
        row_start(space.ints({B + 1})),
        lengths(space.ints({B})),
        root(space.ints({B})),
        thresholds(space.floats({0})),
        widths(space.ints({1})),
        tree_tokens(space.ints({B, 1 + k})),
        parents(space.ints({B, 1 + k})),
        tree_depths(space.ints({B, 1 + k})),
        scores(space.floats({B, 1 + k})),
        ancestors(space.ints({B, 1 + k, k / 32 + 1})),
        counts(space.ints({B})),
        top_tokens(space.ints({B, 1, parts(op), k})),
        top_scores(space.floats({B, 1, parts(op), k})),
        sums(space.floats({B, 1, parts(op)})),
        arrived(space.ints({B})) {}

  static int64_t parts(const DraftBackbone& op) {
    return (op.network->head.total_rows() + kVocabularyPart - 1) / kVocabularyPart;
  }

  ExpandBackbone expansion() const {
    const BackboneTrees trees{tree_tokens, parents, tree_depths, scores, ancestors, counts};
    return {logits, root, thresholds, widths, trees, top_tokens, top_scores, sums, arrived};
  }
};

// The tensor with all dimensions but the first flattened.
TensorView as_rows(const TensorView& x) { return tensor(x.data, x.dtype, {x.shape[0], x.numel() / x.shape[0]}); }

// Runs the decoder over M rows of tokens [M] and hidden states [M, C].
void pass(const DraftBackbone& op, const PassRows& rows, const TensorView& tokens, const TensorView& hidden_states,
          const TensorView& depths, const TensorView& lengths, const TensorView& row_start) {
  const Decoder& d = op.network->decoder;
  const TensorView none;
  run_cpu(GatherRows{op.network->embedding, tokens, rows.embedded});
  run_cpu(RmsNorm{rows.embedded, none, op.network->embedding_norm, rows.normed_embedded, d.eps});
  run_cpu(RmsNorm{hidden_states, none, op.network->hidden_state_norm, rows.normed, d.eps});
  for (int64_t m = 0; m < tokens.shape[0]; ++m) {
    float* both = rows.first_inputs.as<float>() + m * 2 * d.hidden;
    std::copy_n(rows.normed_embedded.as<float>() + m * d.hidden, d.hidden, both);
    std::copy_n(rows.normed.as<float>() + m * d.hidden, d.hidden, both + d.hidden);
  }
  const KvCacheView cache{op.cache.k_cache, op.cache.v_cache, op.cache.block_table, lengths, row_start, 0};
  run_cpu(DecoderPass{&d, none, op.network->before_residual ? rows.normed : hidden_states, rows.first_inputs, depths,
                      none, cache, op.cos, op.sin, rows.hidden_states, rows.at_layers, rows.workspace});
}

// Brings x to the form that a projection multiplies.
void prepare(const TensorView& x, const Projection& reader, const TensorView& out) {
  if (reader.quantised()) return run_cpu(QuantiseRows{x, out});
  std::copy_n(x.as<float>(), x.numel(), out.as<float>());
}

// Writes a level: the best children of every request's last row.
void expand(const DraftBackbone& op, const PerRequest& own, int64_t level) {
  const int64_t B = own.root.shape[0], T = op.children.shape[1], k = op.children.shape[2];
  prepare(own.read, op.network->head, own.head_in);
  project(own.head_in, op.network->head, as_rows(own.logits));
  try {
    run_cpu(own.expansion());
  } catch (const std::invalid_argument& error) {  // the logits that it names are no argument of this op
    fail("hidden_states: level ", level, " has no distribution; ", error.what());
  }
  const int32_t* vocabulary = op.network->vocabulary.defined() ? op.network->vocabulary.as<int32_t>() : nullptr;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < k; ++i) {
      const int32_t token = own.tree_tokens.as<int32_t>()[b * (1 + k) + 1 + i];
      op.children.as<int32_t>()[(b * T + level) * k + i] = vocabulary ? vocabulary[token] : token;
      op.scores.as<float>()[(b * T + level) * k + i] = own.scores.as<float>()[b * (1 + k) + 1 + i];
    }
  }
}

}  // namespace

void BackboneNetwork::validate() const {
  Checker check;
  const Decoder& d = decoder;
  if (d.first_columns != 2 * d.hidden) {
    fail("decoder: expected first_columns=", 2 * d.hidden, ", got ", d.first_columns);
  }
  if (d.hidden_state_layers != std::vector<int64_t>{static_cast<int64_t>(d.layers.size())}) {
    fail("decoder: expected the last layer's output as its only hidden_state_layers");
  }
  Dim V{"V"}, C{"C", d.hidden, "hidden"};
  check_weight(check, embedding, "embedding", V, C);
  check(embedding_norm, "embedding_norm", {DType::kFloat32}, {d.hidden});
  check(hidden_state_norm, "hidden_state_norm", {DType::kFloat32}, {d.hidden});
  check_projection(check, head, "head", head.total_rows(), d.hidden);
  check.optional(vocabulary, "vocabulary", {DType::kInt32}, {head.total_rows()});
  if (check.device() != Device::kCpu) fail("embedding: expected a tensor on cpu, got ", name_of(check.device()));
  if (vocabulary.defined()) check_ids(vocabulary, "vocabulary", embedding.shape[0] * kPanel);
}

Device DraftBackbone::validate() const {
  Checker check;
  const Decoder& d = network->decoder;
  const Projection& head = network->head;
  Dim M{"M"}, F{"F"}, B{"B"}, T{"T"}, k{"k"}, positions{"positions"};
  check(tokens, "tokens", {DType::kInt32}, {M});
  check(hidden_states, "hidden_states", {DType::kFloat32}, {M, F});
  if (network->fuses()) check_projection(check, network->fuse, "fuse", d.hidden, F);
  if (!network->fuses() && F != d.hidden) fail("hidden_states: expected ", d.hidden, " columns, got ", F.value);
  cache.validate(check, static_cast<int64_t>(d.layers.size()), d.kv_heads, d.head_dim);
  B.value = cache.requests(), B.bound_by = "lengths";
  check(cos, "cos", {DType::kFloat32}, {positions, d.head_dim / 2});
  check(sin, "sin", {DType::kFloat32}, {positions, d.head_dim / 2});
  check(children, "children", {DType::kInt32}, {B, T, k});
  check(scores, "scores", {DType::kFloat32}, {B, T, k});
  check(levels, "levels", {DType::kInt32}, {B});
  if (T < 1 || k < 1 || k > std::min<int64_t>(kMaxNodes - 1, head.total_rows())) {
    fail("children: expected at least one level of 1 to ", std::min<int64_t>(kMaxNodes - 1, head.total_rows()),
         " tokens, got ", T.value, " of ", k.value);
  }
  return check.device();
}

// Checks values for all levels before anything is written.
void check_values(const DraftBackbone& op) {
  const int64_t T = op.children.shape[1], V = op.network->embedding.shape[0] * kPanel;
  KvCacheView cache = op.cache.layer(0);
  cache.first_node = T - 1;
  cache.validate_rows(op.tokens.shape[0]);
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  for (int64_t b = 0; b < cache.requests(); ++b) {
    if (row_start[b + 1] == row_start[b]) fail("row_start: request ", b, " has no pair");
    const int64_t last = op.cache.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b] + T - 2;
    if (last >= op.cos.shape[0]) fail("lengths: position ", last, " is past the ", op.cos.shape[0], " rows of cos");
  }
  check_ids(op.tokens, "tokens", V);
}

void run_cpu(const DraftBackbone& op) {
  check_values(op);
  const int64_t M = op.tokens.shape[0], B = op.cache.lengths.shape[0], T = op.children.shape[1],
                k = op.children.shape[2];
  const int64_t C = op.network->decoder.hidden;
  const int32_t* row_start = op.cache.row_start.as<int32_t>();

  Workspace count(nullptr);
  PerRequest(op, B, k, count), FirstRows(op, M, count), PassRows(op.network->decoder, std::max(M, B), count);
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[count.used() + 64]);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  Workspace space(memory.get() + (64 - address % 64));
  const PerRequest own(op, B, k, space);
  std::fill_n(own.root.as<int32_t>(), B, 0), std::fill_n(own.depths.as<int32_t>(), B, 0);
  std::fill_n(own.arrived.as<int32_t>(), B, 0);
  *own.widths.as<int32_t>() = static_cast<int32_t>(k);
  for (int64_t b = 0; b <= B; ++b) own.row_start.as<int32_t>()[b] = static_cast<int32_t>(b);

  const auto keep = [&](const PassRows& rows, int64_t b, int64_t row) {
    const float* normed = rows.hidden_states.as<float>() + row * C;
    std::copy_n(normed, C, own.read.as<float>() + b * C);
    std::copy_n(op.network->feed_back ? normed : rows.at_layers.as<float>() + row * C, C, own.fed.as<float>() + b * C);
  };
  {
    Workspace after = space;
    const FirstRows first(op, M, after);
    const PassRows rows(op.network->decoder, M, after);
    for (int64_t b = 0; b < B; ++b) {
      std::iota(first.depths.as<int32_t>() + row_start[b], first.depths.as<int32_t>() + row_start[b + 1], 0);
    }
    if (op.network->fuses()) {
      prepare(op.hidden_states, op.network->fuse, first.given);
      project(first.given, op.network->fuse, first.fused);
    }
    pass(op, rows, op.tokens, op.network->fuses() ? first.fused : op.hidden_states, first.depths, op.cache.lengths,
         op.cache.row_start);
    for (int64_t b = 0; b < B; ++b) {
      keep(rows, b, row_start[b + 1] - 1);
      own.lengths.as<int32_t>()[b] = op.cache.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b];
    }
  }
  expand(op, own, 0);
  const PassRows rows(op.network->decoder, B, space);
  int64_t level = 1;
  for (; level < T; ++level) {
    double longer = 0;  // sum over requests of the expected gain, as a share of the run so far
    for (int64_t b = 0; b < B; ++b) {
      float score = 0;
      for (int64_t t = 0; t < level; ++t) score += op.scores.as<float>()[(b * T + t) * k];
      const double reached = std::exp(score), depth = static_cast<double>(level);
      longer += std::pow(reached, 1 + 1 / depth) / (1 + depth * reached);
      own.tokens.as<int32_t>()[b] = op.children.as<int32_t>()[(b * T + level - 1) * k];
    }
    if (longer < op.min_level_gain * static_cast<double>(B)) break;
    pass(op, rows, own.tokens, own.fed, own.depths, own.lengths, own.row_start);
    for (int64_t b = 0; b < B; ++b) keep(rows, b, b), ++own.lengths.as<int32_t>()[b];
    expand(op, own, level);
  }
  std::fill_n(op.levels.as<int32_t>(), B, static_cast<int32_t>(level));
}

}  // namespace specengine
