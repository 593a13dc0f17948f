#include "ops/draft_backbone.h"

#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "ops/expand_backbone.h"
#include "ops/layer.h"
#include "workspace.h"

namespace specengine {
namespace {

// What a pass of M rows reads and writes.
struct PassRows {
  TensorView embedded, normed_embedded, normed, first_inputs, hidden_states, at_layers, workspace;

  PassRows(const Decoder& d, int64_t M, Workspace& space)
      : embedded(space.floats({M, d.C})),
        normed_embedded(space.floats({M, d.C})),
        normed(space.floats({M, d.C})),
        first_inputs(space.floats({M, 2 * d.C})),
        hidden_states(space.floats({M, d.C})),
        at_layers(space.floats({M, 1, d.C})),
        workspace(space.bytes(d.workspace_bytes(M))) {}
};

// The first pass's own: hidden states fused, and where its rows stand.
struct FirstRows {
  TensorView given, fused, depths;

  FirstRows(const DraftBackbone& op, int64_t M, Workspace& space) : depths(space.ints({M})) {
    if (!op.fuse) return;
    given = space.rows(M, op.hidden_states.shape[1], *op.fuse), fused = space.floats({M, op.decoder.C});
  }
};

// What is there of every request.
struct PerSequence {
  TensorView read, fed;  // outputs of the last row: for the head, and what is fed back
  TensorView head_in, logits;
  TensorView tokens, depths, row_start, lengths;  // of the next level's row
  TensorView root, thresholds, widths, tree_tokens, parents, tree_depths, scores, ancestors, counts, top_tokens,
      top_scores, sums, arrived;  // of expand_backbone

  PerSequence(const DraftBackbone& op, int64_t B, int64_t k, Workspace& space)
      : read(space.floats({B, op.decoder.C})),
        fed(space.floats({B, op.decoder.C})),
        head_in(space.rows(B, op.decoder.C, op.head)),
        logits(space.floats({B, 1, op.head.total_rows()})),
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
    return (op.head.total_rows() + kVocabularyPart - 1) / kVocabularyPart;
  }

  ExpandBackbone expansion() const {
    return {logits, root,      thresholds, widths,     tree_tokens, parents, tree_depths,
            scores, ancestors, counts,     top_tokens, top_scores,  sums,    arrived};
  }
};

// [rows, ..] of a tensor's first dimension, flattened to two.
TensorView as_rows(const TensorView& x) { return tensor(x.data, x.dtype, {x.shape[0], x.numel() / x.shape[0]}); }

// A pass over M rows of tokens [M] and features [M, C].
void pass(const DraftBackbone& op, const PassRows& rows, const TensorView& tokens, const TensorView& hidden_states,
          const TensorView& depths, const TensorView& lengths, const TensorView& row_start) {
  const Decoder& d = op.decoder;
  const TensorView none;
  run_cpu(GatherRows{op.embedding, tokens, rows.embedded});
  run_cpu(RmsNorm{rows.embedded, none, op.embedding_norm, rows.normed_embedded, d.eps});
  run_cpu(RmsNorm{hidden_states, none, op.feature_norm, rows.normed, d.eps});
  for (int64_t m = 0; m < tokens.shape[0]; ++m) {
    float* both = rows.first_inputs.as<float>() + m * 2 * d.C;
    std::copy_n(rows.normed_embedded.as<float>() + m * d.C, d.C, both);
    std::copy_n(rows.normed.as<float>() + m * d.C, d.C, both + d.C);
  }
  run_cpu(DecoderPass{d, none, op.before_residual ? rows.normed : hidden_states, rows.first_inputs, depths, none,
                      op.k_cache, op.v_cache, op.block_table, lengths, row_start, op.cos, op.sin, rows.hidden_states,
                      rows.at_layers, rows.workspace, 0});
}

// x as a projection multiplies it.
void prepare(const TensorView& x, const Projection& reader, const TensorView& out) {
  if (reader.quantised()) return run_cpu(QuantiseRows{x, out});
  std::copy_n(x.as<float>(), x.numel(), out.as<float>());
}

// Writes a level: the best children of every request's last row.
void expand(const DraftBackbone& op, const PerSequence& own, int64_t level) {
  const int64_t B = own.root.shape[0], T = op.children.shape[1], k = op.children.shape[2];
  prepare(own.read, op.head, own.head_in);
  project(own.head_in, op.head, as_rows(own.logits));
  try {
    run_cpu(own.expansion());
  } catch (const std::invalid_argument& error) {  // it names its logits, which are no argument here
    fail("hidden_states: level ", level, " has no distribution; ", error.what());
  }
  const int32_t* vocabulary = op.vocabulary.defined() ? op.vocabulary.as<int32_t>() : nullptr;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < k; ++i) {
      const int32_t token = own.tree_tokens.as<int32_t>()[b * (1 + k) + 1 + i];
      op.children.as<int32_t>()[(b * T + level) * k + i] = vocabulary ? vocabulary[token] : token;
      op.scores.as<float>()[(b * T + level) * k + i] = own.scores.as<float>()[b * (1 + k) + 1 + i];
    }
  }
}

}  // namespace

Device DraftBackbone::validate() const {
  Checker check;
  const Decoder& d = decoder;
  const auto layers = static_cast<int64_t>(d.layers.size());
  Dim M{"M"}, F{"F"}, P{"P"}, B{"B"}, max_pages{"max_pages"}, T{"T"}, k{"k"}, positions{"positions"}, V{"V"};
  if (d.first_columns != 2 * d.C) fail("decoder: expected first_columns=", 2 * d.C, ", got ", d.first_columns);
  if (d.hidden_state_layers != std::vector<int64_t>{layers})
    fail("decoder: expected the last layer's output as its one tap");
  Dim C{"C", d.C, "hidden"};
  check_weight(check, embedding, "embedding", V, C);
  check(embedding_norm, "embedding_norm", {DType::kFloat32}, {d.C});
  check(feature_norm, "feature_norm", {DType::kFloat32}, {d.C});
  check_projection(check, head, "head", head.total_rows(), d.C);
  check.optional(vocabulary, "vocabulary", {DType::kInt32}, {head.total_rows()});
  check(tokens, "tokens", {DType::kInt32}, {M});
  check(hidden_states, "hidden_states", {DType::kFloat32}, {M, F});
  if (fuse) check_projection(check, *fuse, "fuse", d.C, F);
  if (!fuse && F != d.C) fail("hidden_states: expected ", d.C, " columns, got ", F.value);
  check(k_cache, "k_cache", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {layers, P, d.K, kPageSize, d.D});
  check(v_cache, "v_cache", {k_cache.dtype}, {layers, P, d.K, kPageSize, d.D});
  check(block_table, "block_table", {DType::kInt32}, {B, max_pages});
  check(lengths, "lengths", {DType::kInt32}, {B});
  check(row_start, "row_start", {DType::kInt32}, {B + 1});
  check(cos, "cos", {DType::kFloat32}, {positions, d.D / 2});
  check(sin, "sin", {DType::kFloat32}, {positions, d.D / 2});
  check(children, "children", {DType::kInt32}, {B, T, k});
  check(scores, "scores", {DType::kFloat32}, {B, T, k});
  check(levels, "levels", {DType::kInt32}, {B});
  if (T < 1 || k < 1 || k > std::min<int64_t>(kMaxNodes - 1, head.total_rows())) {
    fail("children: expected at least one level of 1 to ", std::min<int64_t>(kMaxNodes - 1, head.total_rows()),
         " tokens, got ", T.value, " of ", k.value);
  }
  return check.device();
}

// Everything that a level may need, before anything is written.
void check_values(const DraftBackbone& op) {
  const int64_t T = op.children.shape[1], V = op.embedding.shape[0] * kPanel;
  KvCacheView cache{layer_of(op.k_cache, 0), layer_of(op.v_cache, 0), op.block_table, op.lengths, op.row_start, T - 1};
  cache.K = op.decoder.K, cache.D = op.decoder.D, cache.B = op.lengths.shape[0];
  cache.validate_rows(op.tokens.shape[0]);
  const int32_t* row_start = op.row_start.as<int32_t>();
  for (int64_t b = 0; b < cache.B; ++b) {
    if (row_start[b + 1] == row_start[b]) fail("row_start: request ", b, " has no pair");
    const int64_t last = op.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b] + T - 2;
    if (last >= op.cos.shape[0]) fail("lengths: position ", last, " is past the ", op.cos.shape[0], " rows of cos");
  }
  check_ids(op.tokens, "tokens", V);
  if (op.vocabulary.defined()) check_ids(op.vocabulary, "vocabulary", V);
}

void run_cpu(const DraftBackbone& op) {
  check_values(op);
  const int64_t M = op.tokens.shape[0], B = op.lengths.shape[0], T = op.children.shape[1], k = op.children.shape[2];
  const int64_t C = op.decoder.C;
  const int32_t* row_start = op.row_start.as<int32_t>();

  Workspace count(nullptr);
  PerSequence(op, B, k, count), FirstRows(op, M, count), PassRows(op.decoder, std::max(M, B), count);
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[count.used() + 64]);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  Workspace space(memory.get() + (64 - address % 64));
  const PerSequence own(op, B, k, space);
  std::fill_n(own.root.as<int32_t>(), B, 0), std::fill_n(own.depths.as<int32_t>(), B, 0);
  std::fill_n(own.arrived.as<int32_t>(), B, 0);
  *own.widths.as<int32_t>() = static_cast<int32_t>(k);
  for (int64_t b = 0; b <= B; ++b) own.row_start.as<int32_t>()[b] = static_cast<int32_t>(b);

  const auto keep = [&](const PassRows& rows, int64_t b, int64_t row) {
    const float* normed = rows.hidden_states.as<float>() + row * C;
    std::copy_n(normed, C, own.read.as<float>() + b * C);
    std::copy_n(op.feed_back ? normed : rows.at_layers.as<float>() + row * C, C, own.fed.as<float>() + b * C);
  };
  {
    Workspace after = space;
    const FirstRows first(op, M, after);
    const PassRows rows(op.decoder, M, after);
    for (int64_t b = 0; b < B; ++b) {
      std::iota(first.depths.as<int32_t>() + row_start[b], first.depths.as<int32_t>() + row_start[b + 1], 0);
    }
    if (op.fuse) prepare(op.hidden_states, *op.fuse, first.given), project(first.given, *op.fuse, first.fused);
    pass(op, rows, op.tokens, op.fuse ? first.fused : op.hidden_states, first.depths, op.lengths, op.row_start);
    for (int64_t b = 0; b < B; ++b) {
      keep(rows, b, row_start[b + 1] - 1);
      own.lengths.as<int32_t>()[b] = op.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b];
    }
  }
  expand(op, own, 0);
  const PassRows rows(op.decoder, B, space);
  int64_t level = 1;
  for (; level < T; ++level) {
    double longer = 0;  // share of the tokens so far, if the next level is as likely as those above on average
    for (int64_t b = 0; b < B; ++b) {
      float score = 0;
      for (int64_t t = 0; t < level; ++t) score += op.scores.as<float>()[(b * T + t) * k];
      const double reached = std::exp(score), depth = static_cast<double>(level);
      longer += std::pow(reached, 1 + 1 / depth) / (1 + depth * reached);
      own.tokens.as<int32_t>()[b] = op.children.as<int32_t>()[(b * T + level - 1) * k];
    }
    if (longer < op.least * static_cast<double>(B)) break;
    pass(op, rows, own.tokens, own.fed, own.depths, own.lengths, own.row_start);
    for (int64_t b = 0; b < B; ++b) keep(rows, b, b), ++own.lengths.as<int32_t>()[b];
    expand(op, own, level);
  }
  std::fill_n(op.levels.as<int32_t>(), B, static_cast<int32_t>(level));
}

}  // namespace specengine
