#include "networks/eagle.h"

#include <tuple>

#include "base/thread_pool.h"
#include "ops/layer.h"

namespace specengine {
namespace {

class EagleNetwork final : public Network {
 public:
  EagleNetwork(const EagleWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes)
      : w_(weights), in_(inputs) {
    const int64_t B = in_.requests(), pairs = in_.tokens.shape[0], F = in_.hidden_states.shape[1];
    const int64_t R = B * (sizes.levels > 1 ? sizes.beam : 1), M = std::max(pairs, R), C = w_.decoder.hidden;
    picked_ = own_.floats({pairs, F});
    if (w_.fuses_pairs()) fused_ = own_.floats({pairs, C});
    embedded_ = own_.floats({M, C}), both_ = own_.floats({M, 2 * C});
    if (w_.has_norms()) left_ = own_.floats({M, C}), right_ = own_.floats({M, C});
    if (!w_.reads_halves()) inputs_ = own_.floats({M, C});
    hidden_states_ = own_.floats({M, C}), at_layers_ = own_.floats({M, 1, C});
    workspace_ = own_.bytes(w_.decoder.workspace_bytes(M)), lengths_ = own_.ints({B});
    read_ = own_.floats({B, C}), fed_ = own_.floats({B, C}), above_ = own_.floats({R, C});
    logits_ = own_.floats({R, w_.head.total_rows()});
  }

  TensorView begin() override {
    const int32_t* last = in_.last.as<int32_t>();
    take_rows(in_.hidden_states, in_.rows.as<int32_t>(), picked_);
    if (w_.fuses_pairs()) multiply(picked_, w_.fuse, fused_);
    pass(in_.tokens, w_.fuses_pairs() ? fused_ : picked_, in_.depths, in_.cache(0), TensorView());
    take_rows(outputs(w_.has_norms()), last, read_);
    take_rows(outputs(w_.feed_back), last, fed_);
    for (int64_t b = 0; b < in_.requests(); ++b) lengths_.as<int32_t>()[b] = in_.ends.as<int32_t>()[b] - 1;
    return logits(read_);
  }

  TensorView step(const LevelRows& rows) override {
    const int64_t R = rows.tokens.shape[0];
    const TensorView above = rows_of(above_, 0, R);
    take_rows(fed_, rows.above.as<int64_t>(), above);
    KvCacheView cache = in_.cache(0);
    cache.lengths = lengths_, cache.row_start = rows.row_start, cache.first_node = rows.first_node;
    pass(rows.tokens, above, rows.depths, cache, rows.ancestors);
    fed_ = outputs(w_.feed_back);
    return logits(rows_of(outputs(w_.has_norms()), 0, R));
  }

 private:
  // Of the last pass, [M, hidden]: after the final norm, or of the last layer.
  const TensorView& outputs(bool normed) const { return normed ? hidden_states_ : at_layers_; }

  TensorView logits(const TensorView& read) const {
    const int64_t R = read.shape[0];
    const TensorView out = rows_of(logits_, 0, R);
    multiply(as_rows(read), w_.head, out);
    return out;
  }

  // Runs the decoder over M rows of tokens [M] and hidden states [M, C].
  void pass(const TensorView& tokens, const TensorView& hidden_states, const TensorView& depths,
            const KvCacheView& cache, const OptionalTensor& ancestors) const {
    const Decoder& d = w_.decoder;
    const int64_t M = tokens.shape[0];
    const TensorView none, embedded = rows_of(embedded_, 0, M), both = rows_of(both_, 0, M);
    run_cpu(GatherRows{w_.embedding, tokens, embedded});
    TensorView left = embedded, right = hidden_states;
    if (w_.has_norms()) {
      left = rows_of(left_, 0, M), right = rows_of(right_, 0, M);
      run_cpu(RmsNorm{embedded, none, w_.embedding_norm, left, d.eps});
      run_cpu(RmsNorm{hidden_states, none, w_.hidden_state_norm, right, d.eps});
    }
    join_columns(left, right, both);
    TensorView inputs = w_.before_residual ? right : hidden_states, first_inputs = both;
    if (!w_.reads_halves()) {
      inputs = rows_of(inputs_, 0, M), first_inputs = none;
      multiply(both, w_.fuse, inputs);
    }
    run_cpu(DecoderPass{&d,
                        none,
                        inputs,
                        first_inputs,
                        depths,
                        ancestors,
                        cache,
                        {in_.caches[0].cos, in_.caches[0].sin},
                        {rows_of(hidden_states_, 0, M), rows_of(at_layers_, 0, M)},
                        workspace_});
  }

  const EagleWeights& w_;
  const DraftInputs& in_;
  Scratch own_;
  TensorView picked_, fused_, lengths_, read_;  // of the true pairs, and of the last one of each request
  TensorView embedded_, left_, right_, both_, inputs_, hidden_states_, at_layers_, workspace_;  // of a pass
  TensorView fed_, above_, logits_;  // fed: the rows before, in place of hidden states
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
