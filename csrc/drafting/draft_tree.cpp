#include "ops/draft_tree.h"

#include <memory>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "base/thread_pool.h"
#include "drafting/growing_trees.h"
#include "ops/layer.h"
#include "ops/top_tokens.h"

namespace specengine {
namespace {

// The tensors of a pass of at most M rows.
struct PassRows {
  TensorView embedded, normed_embedded, normed, both, fuse_in, inputs, depths, hidden_states, at_layers, workspace;

  PassRows(const EagleWeights& w, int64_t M, Workspace& space) : PassRows(w, w.decoder, w.decoder.hidden, M, space) {}

  // What the head reads, and what the next level goes on from, [M, hidden] each.
  const TensorView& read(const EagleWeights& w) const { return w.has_norms() ? hidden_states : at_layers; }
  const TensorView& fed(const EagleWeights& w) const {
    return w.has_norms() && w.feed_back ? hidden_states : at_layers;
  }

 private:
  PassRows(const EagleWeights& w, const Decoder& d, int64_t C, int64_t M, Workspace& space)
      : embedded(space.floats({M, C})),
        normed_embedded(space.floats({w.has_norms() ? M : 0, C})),
        normed(space.floats({w.has_norms() ? M : 0, C})),
        both(space.floats({M, 2 * C})),
        depths(space.ints({M})),
        hidden_states(space.floats({M, C})),
        at_layers(space.floats({M, 1, C})),
        workspace(space.bytes(d.workspace_bytes(M))) {
    if (w.has_norms()) return;
    fuse_in = space.rows(M, 2 * C, w.fuse), inputs = space.floats({M, C});
  }
};

// The tensors of a level: the nodes that are expanded, and their children.
struct LevelRows {
  TensorView read, fed, head_in, logits, top_tokens, log_probs, tokens, sources, row_start, lengths, ancestors,
      fed_rows;

  LevelRows(const DraftTree& op, Workspace& space) : LevelRows(op, op.plan.limits.shape[0], space) {}

 private:
  LevelRows(const DraftTree& op, int64_t B, Workspace& space)
      : LevelRows(op, *op.weights, B, B * (op.plan.levels > 1 ? op.plan.beam : 1), op.weights->decoder.hidden, space) {}

  LevelRows(const DraftTree& op, const EagleWeights& w, int64_t B, int64_t R, int64_t C, Workspace& space)
      : read(space.floats({R, C})),
        fed(space.floats({R, C})),
        head_in(space.rows(R, C, w.head)),
        logits(space.floats({R, w.head.total_rows()})),
        top_tokens(space.ints({R, op.plan.top_k})),
        log_probs(space.floats({R, op.plan.top_k})),
        tokens(space.ints({R})),
        sources(space.ints({R})),
        row_start(space.ints({B + 1})),
        lengths(space.ints({B})),
        ancestors(space.ints({R, (GrowingTrees::expanded(op) + 31) / 32})),
        fed_rows(space.floats({R, C})) {}
};

// The first rows of a tensor.
TensorView first(TensorView x, int64_t rows) {
  x.shape[0] = rows;
  return x;
}

void copy_row(const TensorView& from, int64_t row, const TensorView& to, int64_t to_row, int64_t columns) {
  std::copy_n(from.as<float>() + row * columns, columns, to.as<float>() + to_row * columns);
}

// Brings x to the form that a projection multiplies.
void prepare(const TensorView& x, const Projection& reader, const TensorView& out) {
  if (reader.quantises_rows()) return run_cpu(QuantiseRows{x, out});
  std::copy_n(x.as<float>(), x.numel(), out.as<float>());
}

// Runs the decoder over M rows of tokens [M] and hidden states [M, C].
void pass(const DraftTree& op, const PassRows& rows, const TensorView& tokens, const TensorView& hidden_states,
          const KvCacheView& cache, const TensorView& ancestors) {
  const EagleWeights& w = *op.weights;
  const Decoder& d = w.decoder;
  const int64_t M = tokens.shape[0], C = d.hidden;
  const TensorView none, embedded = first(rows.embedded, M), both = first(rows.both, M);
  run_cpu(GatherRows{w.embedding, tokens, embedded});
  TensorView left = embedded, right = hidden_states;
  if (w.has_norms()) {
    left = first(rows.normed_embedded, M), right = first(rows.normed, M);
    run_cpu(RmsNorm{embedded, none, w.embedding_norm, left, d.eps});
    run_cpu(RmsNorm{hidden_states, none, w.hidden_state_norm, right, d.eps});
  }
  for (int64_t m = 0; m < M; ++m) copy_row(left, m, both, 2 * m, C), copy_row(right, m, both, 2 * m + 1, C);
  TensorView inputs = w.before_residual ? right : hidden_states, first_inputs = both;
  if (!w.has_norms()) {
    const TensorView fuse_in = first(rows.fuse_in, M);
    inputs = first(rows.inputs, M), first_inputs = none;
    prepare(both, w.fuse, fuse_in);
    project(fuse_in, w.fuse, inputs);
  }
  run_cpu(DecoderPass{&d,
                      none,
                      inputs,
                      first_inputs,
                      first(rows.depths, M),
                      ancestors,
                      cache,
                      {op.cos, op.sin},
                      {first(rows.hidden_states, M), first(rows.at_layers, M)},
                      rows.workspace});
}

// Adds a level: the best children of R rows of what the head reads.
void expand(const DraftTree& op, const LevelRows& own, int64_t R, GrowingTrees& trees) {
  const TensorView head_in = first(own.head_in, R), logits = first(own.logits, R);
  const TensorView top_tokens = first(own.top_tokens, R), log_probs = first(own.log_probs, R);
  prepare(first(own.read, R), op.weights->head, head_in);
  project(head_in, op.weights->head, logits);
  try {
    run_cpu(TopTokens{logits, top_tokens, log_probs});
  } catch (const std::invalid_argument& error) {  // the logits that it names are no argument of this op
    fail("hidden_states: level ", trees.levels(), " has no distribution; ", error.what());
  }
  trees.add(top_tokens, log_probs);
}

// The hidden states of the true pairs, and their fusion where they are fused.
struct PairStates {
  TensorView picked, fuse_in, fused;

  PairStates(const DraftTree& op, Workspace& space) {
    const EagleWeights& w = *op.weights;
    const int64_t M = op.tokens.shape[0], F = op.hidden_states.shape[1];
    picked = space.floats({M, F});
    if (w.fuses_pairs()) fuse_in = space.rows(M, F, w.fuse), fused = space.floats({M, w.decoder.hidden});
  }
};

// Reads the true pairs; leaves the outputs at each request's last one.
void read_pairs(const DraftTree& op, const LevelRows& own, Workspace space) {
  const EagleWeights& w = *op.weights;
  const int64_t M = op.tokens.shape[0], B = op.plan.limits.shape[0], C = w.decoder.hidden;
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  const PairStates states(op, space);
  for (int64_t m = 0; m < M; ++m) {
    copy_row(op.hidden_states, op.rows.as<int32_t>()[m], states.picked, m, op.hidden_states.shape[1]);
  }
  if (w.fuses_pairs()) {
    prepare(states.picked, w.fuse, states.fuse_in);
    project(states.fuse_in, w.fuse, states.fused);
  }
  const PassRows rows(w, M, space);
  for (int64_t b = 0; b < B; ++b) {
    std::iota(rows.depths.as<int32_t>() + row_start[b], rows.depths.as<int32_t>() + row_start[b + 1], 0);
  }
  pass(op, rows, op.tokens, w.fuses_pairs() ? states.fused : states.picked, op.cache, TensorView());
  for (int64_t b = 0; b < B; ++b) {
    const int64_t last = row_start[b + 1] - 1;
    copy_row(rows.read(w), last, own.read, b, C), copy_row(rows.fed(w), last, own.fed, b, C);
    own.tokens.as<int32_t>()[b] = op.tokens.as<int32_t>()[last];
    own.lengths.as<int32_t>()[b] = op.cache.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b] - 1;
  }
}

// Reads the beam's nodes.
void read_level(const DraftTree& op, const LevelRows& own, const PassRows& rows, GrowingTrees& trees,
                int64_t width_before) {
  const EagleWeights& w = *op.weights;
  const int64_t B = op.plan.limits.shape[0], R = B * trees.width(), C = w.decoder.hidden, opened = trees.opened();
  trees.open(own.tokens.as<int32_t>(), own.sources.as<int32_t>(), own.row_start.as<int32_t>(),
             own.ancestors.as<uint32_t>(), width_before);
  for (int64_t r = 0; r < R; ++r) copy_row(own.fed, own.sources.as<int32_t>()[r], own.fed_rows, r, C);
  std::fill_n(rows.depths.as<int32_t>(), R, static_cast<int32_t>(trees.levels()));
  const KvCacheView cache{op.cache.k_cache, op.cache.v_cache, op.cache.block_table, own.lengths, own.row_start, opened};
  pass(op, rows, first(own.tokens, R), first(own.fed_rows, R), cache,
       trees.chain() ? TensorView() : first(own.ancestors, R));
  std::copy_n(rows.read(w).as<float>(), R * C, own.read.as<float>());
  std::copy_n(rows.fed(w).as<float>(), R * C, own.fed.as<float>());
}

// Checks values for all levels before anything is written.
void check_values(const DraftTree& op) {
  const int64_t V = op.weights->embedding.shape[0] * kPanel;
  KvCacheView cache = op.cache.layer(0);
  cache.first_node = GrowingTrees::expanded(op) - 1;
  cache.validate_rows(op.tokens.shape[0]);
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  for (int64_t b = 0; b < cache.requests(); ++b) {
    if (row_start[b + 1] == row_start[b]) fail("row_start: request ", b, " has no pair");
    const int64_t last = op.cache.lengths.as<int32_t>()[b] + row_start[b + 1] - row_start[b] + op.plan.levels - 2;
    if (last >= op.cos.shape[0]) fail("lengths: position ", last, " is past the ", op.cos.shape[0], " rows of cos");
    if (op.plan.limits.as<int32_t>()[b] < 0) fail("limits: entry ", b, " is negative");
  }
  check_ids(op.tokens, "tokens", V);
  check_ids(op.rows, "rows", op.hidden_states.shape[0]);
}

}  // namespace

void EagleWeights::validate() const {
  Checker check;
  const Decoder& d = decoder;
  Dim V{"V"}, C{"C", d.hidden, "hidden"};
  check_weight(check, embedding, "embedding", V, C);
  check.optional(embedding_norm, "embedding_norm", {DType::kFloat32}, {d.hidden});
  check.optional(hidden_state_norm, "hidden_state_norm", {DType::kFloat32}, {d.hidden});
  for (const auto& [name, norm, other] : {std::tuple("embedding_norm", &embedding_norm, &hidden_state_norm),
                                          std::tuple("hidden_state_norm", &hidden_state_norm, &embedding_norm)}) {
    if (!norm->defined() && other->defined())
      fail(name, ": expected a tensor, got None (of both norms, or of neither)");
  }
  const int64_t columns = has_norms() ? 2 * d.hidden : 0;
  if (d.first_columns != columns) fail("decoder: expected first_columns=", columns, ", got ", d.first_columns);
  if (d.hidden_state_layers != std::vector<int64_t>{static_cast<int64_t>(d.layers.size())}) {
    fail("decoder: expected the last layer's output as its only hidden_state_layers");
  }
  if (!has_norms()) {
    check_projection(check, fuse, "fuse", d.hidden, 2 * d.hidden);
    if (before_residual) fail("before_residual: expected false without hidden_state_norm");
    if (feed_back) fail("feed_back: expected false without hidden_state_norm");
  }
  check_projection(check, head, "head", head.total_rows(), d.hidden);
  check.optional(vocabulary, "vocabulary", {DType::kInt32}, {head.total_rows()});
  if (check.device() != Device::kCpu) fail("embedding: expected a tensor on cpu, got ", name_of(check.device()));
  if (vocabulary.defined()) check_ids(vocabulary, "vocabulary", embedding.shape[0] * kPanel);
}

void EagleWeights::fetch() const {
  constexpr int64_t kMost = 16 << 20;  // of a last-level cache of usually 32 MiB
  std::vector<MemoryRange> ranges;
  int64_t left = kMost;
  const auto add = [&](const Projection& projection) {
    for (const TensorView& weight : projection.weights) {
      const int64_t size = weight.dtype == DType::kUInt8 ? 1 : weight.dtype == DType::kFloat32 ? 4 : 2;
      ranges.push_back({weight.data, std::min(left, weight.numel() * size)});
      left -= ranges.back().bytes;
    }
  };
  add(fuse);
  for (const DecoderLayer& layer : decoder.layers) {
    add(layer.qkv), add(layer.attention_out), add(layer.gate_up), add(layer.down);
  }
  add(head);
  fetch_while_idle(ranges.data(), static_cast<int>(ranges.size()));
}

Device DraftTree::validate() const {
  Checker check;
  const Decoder& d = weights->decoder;
  Dim M{"M"}, R{"R"}, F{"F"}, B{"B"}, N{"N"}, positions{"positions"};
  check(tokens, "tokens", {DType::kInt32}, {M});
  check(rows, "rows", {DType::kInt32}, {M});
  check(hidden_states, "hidden_states", {DType::kFloat32}, {R, F});
  if (weights->fuses_pairs()) check_projection(check, weights->fuse, "fuse", d.hidden, F);
  if (!weights->fuses_pairs() && F != d.hidden) fail("hidden_states: expected ", d.hidden, " columns, got ", F.value);
  cache.validate(check, static_cast<int64_t>(d.layers.size()), d.kv_heads, d.head_dim);
  if (cache.first_node != 0) fail("first_node: expected 0, got ", cache.first_node);
  B.value = cache.requests(), B.bound_by = "lengths";
  check(cos, "cos", {DType::kFloat32}, {positions, d.head_dim / 2});
  check(sin, "sin", {DType::kFloat32}, {positions, d.head_dim / 2});
  check(plan.limits, "limits", {DType::kInt32}, {B});
  check(trees.tokens, "trees.tokens", {DType::kInt32}, {B, N});
  check(trees.parents, "trees.parents", {DType::kInt32}, {B, N});
  check(trees.chances, "trees.chances", {DType::kFloat32}, {B, N});
  check(trees.node_counts, "trees.node_counts", {DType::kInt32}, {B});
  check(trees.levels, "trees.levels", {DType::kInt32}, {B});
  const int64_t most = std::min<int64_t>(kMaxNodes - 1, weights->head.total_rows());
  if (plan.top_k < 1 || plan.top_k > most) fail("top_k: expected 1 to ", most, ", got ", plan.top_k);
  if (plan.beam < 1 || plan.beam > plan.top_k) fail("beam: expected 1 to top_k=", plan.top_k, ", got ", plan.beam);
  if (plan.levels < 1 || plan.levels > kMaxNodes) fail("levels: expected 1 to ", kMaxNodes, ", got ", plan.levels);
  if (GrowingTrees::expanded(*this) > kMaxNodes) {
    fail("levels: ", plan.levels, " of beam=", plan.beam, " expand ", GrowingTrees::expanded(*this), " nodes, at most ",
         kMaxNodes, " are supported");
  }
  if (GrowingTrees::candidates(*this) > kMaxCandidates) {
    fail("levels: ", plan.levels, " of them have ", GrowingTrees::candidates(*this), " candidates, at most ",
         kMaxCandidates, " are supported");
  }
  if (N < 1 || N > kMaxNodes) fail("trees.tokens: N=", N.value, " nodes, expected 1 to ", kMaxNodes);
  return check.device();
}

void run_cpu(const DraftTree& op) {
  check_values(op);
  const int64_t M = op.tokens.shape[0], B = op.plan.limits.shape[0];
  const EagleWeights& w = *op.weights;

  Workspace count(nullptr);
  GrowingTrees(op, count), LevelRows(op, count);
  PairStates(op, count);
  PassRows(w, std::max(M, B * op.plan.beam), count);
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[count.used() + 64]);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  Workspace space(memory.get() + (64 - address % 64));
  GrowingTrees trees(op, space);
  const LevelRows own(op, space);

  read_pairs(op, own, space);
  trees.begin(own.tokens.as<int32_t>());
  expand(op, own, B, trees);
  const PassRows rows(w, B * op.plan.beam, space);
  for (int64_t width = 1; trees.levels() < op.plan.levels && trees.another_level_pays();) {
    const int64_t before = width;
    width = trees.width();
    read_level(op, own, rows, trees, before);
    expand(op, own, B * width, trees);
  }
  trees.select();
}

}  // namespace specengine
