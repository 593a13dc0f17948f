#include "networks/fasteagle.h"

#include <numeric>

#include "ops/layer.h"

namespace specengine {
namespace {

// The tensors of the pass over M rows of F columns of hidden states, and of T levels of B requests, level by level.
struct FastEagleRows {
  TensorView ones, states, embedded, normed, joined, fuse_in, fused, hidden_states, at_layers, workspace;
  TensorView picked, outputs, head_in, logits;
  TensorView markov_rows, markov_in, added;  // of one level: what its nodes' tokens add to the logits behind them

  FastEagleRows(const FastEagleWeights& w, const DraftInputs& in, const DraftSizes& sizes, Workspace& space)
      : FastEagleRows(w, in.tokens.shape[0], in.hidden_states.shape[1], in.requests(), sizes.levels, w.decoder.hidden,
                      space) {}

 private:
  FastEagleRows(const FastEagleWeights& w, int64_t M, int64_t F, int64_t B, int64_t T, int64_t C, Workspace& space) {
    const int64_t layers = static_cast<int64_t>(w.decoder.layers.size()), Vd = w.head.total_rows();
    const int64_t columns = w.reads_halves() ? 2 * C : F + C;
    ones = space.floats({C}), states = space.floats({M, F}), embedded = space.floats({M, C});
    normed = space.floats({M, w.reads_halves() ? C : F}), joined = space.floats({M, columns});
    fuse_in = space.rows(M, w.reads_halves() ? F : columns, w.fuse), fused = space.floats({M, C});
    hidden_states = space.floats({M, C}), at_layers = space.floats({M, layers, C});
    workspace = space.bytes(w.decoder.workspace_bytes(M));
    picked = space.ints({T * B}), outputs = space.floats({T * B, C});
    head_in = space.rows(T * B, C, w.head), logits = space.floats({T * B, Vd});
    if (w.markov_rank == 0) return;
    markov_rows = space.floats({B, w.markov_rank}), markov_in = space.rows(B, w.markov_rank, w.markov_head);
    added = space.floats({B, Vd});
  }
};

class FastEagleNetwork final : public Network {
 public:
  FastEagleNetwork(const FastEagleWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes)
      : w_(weights), in_(inputs), own_(weights, inputs, sizes), levels_(sizes.levels) {}

  TensorView begin() override {
    const Decoder& d = w_.decoder;
    const TensorView none;
    fuse();
    run_cpu(DecoderPass{&d,
                        none,
                        own_->fused,
                        w_.reads_halves() ? OptionalTensor(own_->joined) : OptionalTensor(),
                        in_.depths,
                        none,
                        in_.cache(0),
                        {in_.caches[0].cos, in_.caches[0].sin},
                        {own_->hidden_states, own_->at_layers},
                        own_->workspace});
    const int64_t B = in_.requests(), layers = static_cast<int64_t>(d.layers.size());
    for (int64_t i = 0; i < levels_ * B; ++i) {
      own_->picked.as<int32_t>()[i] = static_cast<int32_t>(in_.last.as<int32_t>()[i % B] * layers + i / B);
    }
    take_rows(own_->at_layers, own_->picked.as<int32_t>(), own_->outputs);
    if (w_.head_norm.defined()) {
      run_cpu(RmsNorm{own_->outputs, none, w_.head_norm, own_->head_in, d.eps});
      project(own_->head_in, w_.head, own_->logits);
    } else {
      project(prepared(own_->outputs, w_.head, own_->head_in), w_.head, own_->logits);
    }
    return w_.markov_rank == 0 ? own_->logits : rows_of(own_->logits, 0, B);
  }

  // Adds to the level's logits what the likeliest tokens of the level above say.
  TensorView step(const LevelRows& rows) override {
    const int64_t B = in_.requests();
    const TensorView logits = rows_of(own_->logits, ++level_ * B, B);
    run_cpu(GatherRows{w_.markov_tokens, rows.own_tokens, own_->markov_rows});
    project(prepared(own_->markov_rows, w_.markov_head, own_->markov_in), w_.markov_head, own_->added);
    for (int64_t i = 0; i < logits.numel(); ++i) logits.as<float>()[i] += own_->added.as<float>()[i];
    return logits;
  }

 private:
  // Makes `fused`, the rows that enter the first layer, and where it reads halves, `joined`, from which it makes
  // q, k, v.
  void fuse() const {
    const Decoder& d = w_.decoder;
    const TensorView none;
    take_rows(in_.hidden_states, in_.rows.as<int32_t>(), own_->states);
    run_cpu(GatherRows{w_.embedding, in_.tokens, own_->embedded});
    if (w_.reads_halves()) {
      project(prepared(own_->states, w_.fuse, own_->fuse_in), w_.fuse, own_->fused);
      run_cpu(RmsNorm{own_->embedded, none, w_.embedding_norm, own_->embedded, d.eps});
      run_cpu(RmsNorm{own_->fused, none, w_.hidden_state_norm, own_->normed, d.eps});
      return join_columns(own_->embedded, own_->normed, own_->joined);
    }
    const auto states = [&](const TensorView& x) { return tensor(x.data, x.dtype, {x.numel() / d.hidden, d.hidden}); };
    std::fill_n(own_->ones.as<float>(), d.hidden, 1.0f);
    run_cpu(RmsNorm{states(own_->states), none, own_->ones, states(own_->normed), d.eps});
    join_columns(own_->normed, own_->embedded, own_->joined);
    project(prepared(own_->joined, w_.fuse, own_->fuse_in), w_.fuse, own_->fused);
  }

  const FastEagleWeights& w_;
  const DraftInputs& in_;
  Placed<FastEagleRows> own_;
  int64_t levels_, level_ = 0;
};

}  // namespace

void FastEagleWeights::validate() const {
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

std::unique_ptr<Network> open_network(const FastEagleWeights& weights, const DraftInputs& inputs,
                                      const DraftSizes& sizes) {
  Checker check;
  const Decoder& d = weights.decoder;
  const int64_t F = inputs.check_hidden_states(check), layers = static_cast<int64_t>(d.layers.size());
  if (F % d.hidden != 0) fail("hidden_states: expected states of ", d.hidden, " columns each, got ", F, " in all");
  check_projection(check, weights.fuse, "fuse", d.hidden, F + (weights.reads_halves() ? 0 : d.hidden));
  if (sizes.levels > layers) fail("levels: expected at most ", layers, ", one per layer, got ", sizes.levels);
  if (sizes.beam > 1) fail("beam: expected 1 of layers that are a chain, got ", sizes.beam);
  check_children(sizes, weights.head.total_rows());
  inputs.check_chains(check, d, weights.embedding.shape[0] * kPanel, 0, 0);
  return std::make_unique<FastEagleNetwork>(weights, inputs, sizes);
}

}  // namespace specengine
