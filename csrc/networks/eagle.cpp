#include "networks/eagle.h"

#include <tuple>

#include "base/thread_pool.h"
#include "ops/layer.h"

namespace specengine {
namespace {

// The tensors of a draft: of passes of at most M rows, and of R rows that the head reads.
struct EagleRows {
  TensorView picked, fuse_in, fused;  // the true pairs
  TensorView embedded, left, right, both, both_in, inputs, hidden_states, at_layers, workspace;
  TensorView lengths, read, fed, above, head_in, logits;

  EagleRows(const EagleWeights& w, const DraftInputs& in, const DraftSizes& sizes, Workspace& space)
      : EagleRows(w, in.requests(), in.tokens.shape[0], in.hidden_states.shape[1],
                  in.requests() * (sizes.levels > 1 ? sizes.beam : 1), w.decoder.hidden, space) {}

 private:
  EagleRows(const EagleWeights& w, int64_t B, int64_t pairs, int64_t F, int64_t R, int64_t C, Workspace& space) {
    const int64_t M = std::max(pairs, R);
    picked = space.floats({pairs, F});
    if (w.fuses_pairs()) fuse_in = space.rows(pairs, F, w.fuse), fused = space.floats({pairs, C});
    embedded = space.floats({M, C}), both = space.floats({M, 2 * C});
    if (w.has_norms()) left = space.floats({M, C}), right = space.floats({M, C});
    if (!w.reads_halves()) both_in = space.rows(M, 2 * C, w.fuse), inputs = space.floats({M, C});
    hidden_states = space.floats({M, C}), at_layers = space.floats({M, 1, C});
    workspace = space.bytes(w.decoder.workspace_bytes(M));
    lengths = space.ints({B});
    read = space.floats({B, C}), fed = space.floats({B, C}), above = space.floats({R, C});
    head_in = space.rows(R, C, w.head), logits = space.floats({R, w.head.total_rows()});
  }
};

class EagleNetwork final : public Network {
 public:
  EagleNetwork(const EagleWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes)
      : w_(weights), in_(inputs), own_(weights, inputs, sizes) {}

  TensorView begin() override {
    const int32_t* last = in_.last.as<int32_t>();
    take_rows(in_.hidden_states, in_.rows.as<int32_t>(), own_->picked);
    if (w_.fuses_pairs()) project(prepared(own_->picked, w_.fuse, own_->fuse_in), w_.fuse, own_->fused);
    pass(in_.tokens, w_.fuses_pairs() ? own_->fused : own_->picked, in_.depths, in_.cache(0), TensorView());
    take_rows(outputs(w_.has_norms()), last, own_->read);
    take_rows(outputs(w_.feed_back), last, own_->fed);
    fed_ = own_->fed;
    for (int64_t b = 0; b < in_.requests(); ++b) own_->lengths.as<int32_t>()[b] = in_.ends.as<int32_t>()[b] - 1;
    return logits(own_->read);
  }

  TensorView step(const LevelRows& rows) override {
    const int64_t R = rows.tokens.shape[0];
    const TensorView above = rows_of(own_->above, 0, R);
    take_rows(fed_, rows.above.as<int64_t>(), above);
    KvCacheView cache = in_.cache(0);
    cache.lengths = own_->lengths, cache.row_start = rows.row_start, cache.first_node = rows.first_node;
    pass(rows.tokens, above, rows.depths, cache, rows.ancestors);
    fed_ = outputs(w_.feed_back);
    return logits(rows_of(outputs(w_.has_norms()), 0, R));
  }

 private:
  // Of the last pass, [M, hidden]: after the final norm, or of the last layer.
  const TensorView& outputs(bool normed) const { return normed ? own_->hidden_states : own_->at_layers; }

  TensorView logits(const TensorView& read) const {
    const int64_t R = read.shape[0];
    const TensorView out = rows_of(own_->logits, 0, R), flat = tensor(read.data, read.dtype, {R, w_.decoder.hidden});
    project(prepared(flat, w_.head, rows_of(own_->head_in, 0, R)), w_.head, out);
    return out;
  }

  // Runs the decoder over M rows of tokens [M] and hidden states [M, C].
  void pass(const TensorView& tokens, const TensorView& hidden_states, const TensorView& depths,
            const KvCacheView& cache, const OptionalTensor& ancestors) const {
    const Decoder& d = w_.decoder;
    const int64_t M = tokens.shape[0];
    const TensorView none, embedded = rows_of(own_->embedded, 0, M), both = rows_of(own_->both, 0, M);
    run_cpu(GatherRows{w_.embedding, tokens, embedded});
    TensorView left = embedded, right = hidden_states;
    if (w_.has_norms()) {
      left = rows_of(own_->left, 0, M), right = rows_of(own_->right, 0, M);
      run_cpu(RmsNorm{embedded, none, w_.embedding_norm, left, d.eps});
      run_cpu(RmsNorm{hidden_states, none, w_.hidden_state_norm, right, d.eps});
    }
    join_columns(left, right, both);
    TensorView inputs = w_.before_residual ? right : hidden_states, first_inputs = both;
    if (!w_.reads_halves()) {
      inputs = rows_of(own_->inputs, 0, M), first_inputs = none;
      project(prepared(both, w_.fuse, rows_of(own_->both_in, 0, M)), w_.fuse, inputs);
    }
    run_cpu(DecoderPass{&d,
                        none,
                        inputs,
                        first_inputs,
                        depths,
                        ancestors,
                        cache,
                        {in_.caches[0].cos, in_.caches[0].sin},
                        {rows_of(own_->hidden_states, 0, M), rows_of(own_->at_layers, 0, M)},
                        own_->workspace});
  }

  const EagleWeights& w_;
  const DraftInputs& in_;
  Placed<EagleRows> own_;
  TensorView fed_;  // the rows before, in place of hidden states
};

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
  if (reads_halves() && (!has_norms() || d.first_columns != 2 * d.hidden)) {
    fail("decoder: expected first_columns=", has_norms() ? 2 * d.hidden : 0, ", got ", d.first_columns);
  }
  if (d.hidden_state_layers != std::vector<int64_t>{static_cast<int64_t>(d.layers.size())}) {
    fail("decoder: expected the last layer's output as its only hidden_state_layers");
  }
  if (!reads_halves()) check_projection(check, fuse, "fuse", d.hidden, 2 * d.hidden);
  if (!reads_halves() && before_residual) fail("before_residual: expected false without first_columns");
  if (!has_norms() && feed_back) fail("feed_back: expected false without hidden_state_norm");
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
      ranges.push_back({weight.data, std::min(left, bytes_of(weight))});
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

std::unique_ptr<Network> open_network(const EagleWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes) {
  Checker check;
  const int64_t F = inputs.check_hidden_states(check), C = weights.decoder.hidden;
  if (weights.fuses_pairs()) check_projection(check, weights.fuse, "fuse", C, F);
  if (!weights.fuses_pairs() && F != C) fail("hidden_states: expected ", C, " columns, got ", F);
  check_children(sizes, weights.head.total_rows());
  inputs.check_chains(check, weights.decoder, weights.embedding.shape[0] * kPanel, sizes.expanded() - 1,
                      sizes.levels - 1);
  return std::make_unique<EagleNetwork>(weights, inputs, sizes);
}

}  // namespace specengine
