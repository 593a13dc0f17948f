#include "networks/heads.h"

#include "ops/layer.h"

namespace specengine {
namespace {

bool same_product(const Projection& a, const Projection& b) {
  bool same = a.weights.size() == b.weights.size() && a.bias.data == b.bias.data;
  for (size_t i = 0; same && i < a.weights.size(); ++i) same = a.weights[i].data == b.weights[i].data;
  return same;
}

class HeadsNetwork final : public Network {
 public:
  HeadsNetwork(const HeadsWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes)
      : w_(weights), in_(inputs), T_(sizes.levels) {
    const int64_t B = in_.requests(), C = w_.hidden;
    x_ = own_.floats({T_ * B, C}), gate_up_ = own_.floats({B, 2 * C}), added_ = own_.floats({B, C});
    logits_ = own_.floats({T_ * B, w_.tokens()});
  }

  TensorView begin() override {
    const int64_t B = in_.requests();
    std::vector<int32_t> before(B);
    for (int64_t b = 0; b < B; ++b) before[b] = in_.rows.as<int32_t>()[in_.last.as<int32_t>()[b]];
    std::fill_n(gate_up_.as<float>(), gate_up_.numel(), 1.0f);
    for (int64_t t = 0; t < T_; ++t) {
      const TensorView x = rows_of(x_, t * B, B);
      take_rows(in_.hidden_states, before.data(), x);
      add_blocks(w_.heads[t], x);
    }
    for (int64_t first = 0, end; first < T_; first = end) {
      const Projection& product = w_.heads[first].logits;
      for (end = first + 1; end < T_ && same_product(w_.heads[end].logits, product);) ++end;
      const int64_t rows = (end - first) * B;
      multiply(rows_of(x_, first * B, rows), product, rows_of(logits_, first * B, rows));
    }
    return logits_;
  }

  TensorView step(const LevelRows&) override { throw std::logic_error("all levels of heads are known at once"); }

 private:
  // x += silu(block(x)), block by block.
  void add_blocks(const DraftHead& head, const TensorView& x) const {
    for (const Projection& block : head.blocks) {
      multiply(x, block, gate_up_);  // the left half; the right one holds ones
      run_cpu(SiluMul{gate_up_, added_});
      for (int64_t i = 0; i < x.numel(); ++i) x.as<float>()[i] += added_.as<float>()[i];
    }
  }

  const HeadsWeights& w_;
  const DraftInputs& in_;
  int64_t T_;
  Scratch own_;
  TensorView x_, gate_up_, added_, logits_;  // rows of T levels lie level by level
};

}  // namespace

void HeadsWeights::validate() const {
  constexpr int64_t kMost = 1 << 24;
  if (hidden < 1 || hidden > kMost) fail("hidden: expected 1 to ", kMost, ", got ", hidden);
  if (heads.empty()) fail("heads: expected at least one");
  Checker check;
  for (size_t i = 0; i < heads.size(); ++i) {
    try {
      for (const Projection& block : heads[i].blocks) check_projection(check, block, "blocks", hidden, hidden);
      check_projection(check, heads[i].logits, "logits", tokens(), hidden);
    } catch (const std::invalid_argument& error) {
      fail("heads: head ", i, ": ", error.what());
    }
  }
  check.optional(vocabulary, "vocabulary", {DType::kInt32}, {tokens()});
  if (check.device() != Device::kCpu) fail("heads: expected tensors on cpu, got ", name_of(check.device()));
  if (vocabulary.defined()) check_ids(vocabulary, "vocabulary", INT32_MAX);
}

std::unique_ptr<Network> open_network(const HeadsWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes) {
  Checker check;
  const int64_t F = inputs.check_hidden_states(check), heads = static_cast<int64_t>(weights.heads.size());
  if (F != weights.hidden) fail("hidden_states: expected ", weights.hidden, " columns, got ", F);
  if (!inputs.caches.empty()) fail("caches: expected none of heads, got ", inputs.caches.size());
  if (sizes.levels > heads) fail("levels: expected at most ", heads, ", one per head, got ", sizes.levels);
  if (sizes.beam > 1) fail("beam: expected 1 of heads, got ", sizes.beam);
  check_children(sizes, weights.tokens());
  return std::make_unique<HeadsNetwork>(weights, inputs, sizes);
}

}  // namespace specengine
