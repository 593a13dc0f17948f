#include "networks/fasteagle.h"

#include <numeric>

#include "ops/layer.h"

namespace specengine {
namespace {

class FastEagleNetwork final : public Network {
 public:
  FastEagleNetwork(const FastEagleWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes)
      : w_(weights), in_(inputs), levels_(sizes.levels) {
    const int64_t B = in_.requests(), M = in_.tokens.shape[0], F = in_.hidden_states.shape[1], TB = levels_ * B;
    const int64_t C = w_.decoder.hidden, layers = static_cast<int64_t>(w_.decoder.layers.size());
    const int64_t columns = w_.reads_halves() ? 2 * C : F + C, Vd = w_.head.total_rows();
    states_ = own_.floats({M, F}), embedded_ = own_.floats({M, C});
    normed_ = own_.floats({M, w_.reads_halves() ? C : F}), joined_ = own_.floats({M, columns});
    fused_ = own_.floats({M, C});
    hidden_states_ = own_.floats({M, C}), at_layers_ = own_.floats({M, layers, C});
    workspace_ = own_.bytes(w_.decoder.workspace_bytes(M)), outputs_ = own_.floats({TB, C});
    logits_ = own_.floats({TB, Vd});
    if (w_.markov_rank == 0) return;
    markov_rows_ = own_.floats({B, w_.markov_rank}), added_ = own_.floats({B, Vd});
  }

  TensorView begin() override {
    const Decoder& d = w_.decoder;
    const TensorView none;
    fuse();
    run_cpu(DecoderPass{&d,
                        none,
                        fused_,
                        w_.reads_halves() ? OptionalTensor(joined_) : OptionalTensor(),
                        in_.depths,
                        none,
                        in_.cache(0),
                        {in_.caches[0].cos, in_.caches[0].sin},
                        {hidden_states_, at_layers_},
                        workspace_});
    const int64_t B = in_.requests(), layers = static_cast<int64_t>(d.layers.size());
    std::vector<int64_t> picked(levels_ * B);  // level by level
    for (int64_t i = 0; i < levels_ * B; ++i) picked[i] = in_.last.as<int32_t>()[i % B] * layers + i / B;
    take_rows(at_layers_, picked.data(), outputs_);
    if (w_.head_norm.defined()) {
      const TensorView head_in = own_.rows(levels_ * B, d.hidden, w_.head);
      run_cpu(RmsNorm{outputs_, none, w_.head_norm, head_in, d.eps});
      project(head_in, w_.head, logits_);
    } else {
      multiply(outputs_, w_.head, logits_);
    }
    return w_.markov_rank == 0 ? logits_ : rows_of(logits_, 0, B);
  }

  // Adds to the level's logits what the likeliest tokens of the level above say.
  TensorView step(const LevelRows& rows) override {
    const int64_t B = in_.requests();
    const TensorView logits = rows_of(logits_, ++level_ * B, B);
    run_cpu(GatherRows{w_.markov_tokens, rows.own_tokens, markov_rows_});
    multiply(markov_rows_, w_.markov_head, added_);
    for (int64_t i = 0; i < logits.numel(); ++i) logits.as<float>()[i] += added_.as<float>()[i];
    return logits;
  }

 private:
  // Makes `fused`, the rows that enter the first layer, and where it reads halves, `joined`, from which it makes
  // q, k, v.
  void fuse() const {
    const Decoder& d = w_.decoder;
    const TensorView none;
    take_rows(in_.hidden_states, in_.rows.as<int32_t>(), states_);
    run_cpu(GatherRows{w_.embedding, in_.tokens, embedded_});
    if (w_.reads_halves()) {
      multiply(states_, w_.fuse, fused_);
      run_cpu(RmsNorm{embedded_, none, w_.embedding_norm, embedded_, d.eps});
      run_cpu(RmsNorm{fused_, none, w_.hidden_state_norm, normed_, d.eps});
      return join_columns(embedded_, normed_, joined_);
    }
    const auto states = [&](const TensorView& x) { return tensor(x.data, x.dtype, {x.numel() / d.hidden, d.hidden}); };
    std::vector<float> ones(d.hidden, 1.0f);
    run_cpu(RmsNorm{states(states_), none, tensor(ones.data(), DType::kFloat32, {d.hidden}), states(normed_), d.eps});
    join_columns(normed_, embedded_, joined_);
    multiply(joined_, w_.fuse, fused_);
  }

  const FastEagleWeights& w_;
  const DraftInputs& in_;
  int64_t levels_, level_ = 0;
  Scratch own_;
  TensorView states_, embedded_, normed_, joined_, fused_, hidden_states_, at_layers_, workspace_;
  TensorView outputs_, logits_;     // of all levels
  TensorView markov_rows_, added_;  // of one level: what its nodes' tokens add to the logits after them
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
