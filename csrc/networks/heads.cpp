#include "networks/heads.h"

#include "ops/layer.h"

namespace specengine {
namespace {

// The tensors of T levels of B requests; their rows lie level by level.
struct HeadRows {
  TensorView before, x, gate_up, added, logits, inputs;

  HeadRows(const HeadsWeights& w, int64_t B, int64_t T, Workspace& space)
      : before(space.ints({B})),
        x(space.floats({T * B, w.hidden})),
        gate_up(space.floats({B, 2 * w.hidden})),
        added(space.floats({B, w.hidden})),
        logits(space.floats({T * B, w.tokens()})),
        inputs(space.floats({T * B, w.hidden + kBlock})) {}  // room for rows in the form of any projection
};

bool same_product(const Projection& a, const Projection& b) {
  bool same = a.weights.size() == b.weights.size() && a.bias.data == b.bias.data;
  for (size_t i = 0; same && i < a.weights.size(); ++i) same = a.weights[i].data == b.weights[i].data;
  return same;
}

class HeadsNetwork final : public Network {
 public:
  HeadsNetwork(const HeadsWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes)
      : w_(weights), in_(inputs), own_(weights, inputs.requests(), sizes.levels), T_(sizes.levels) {}

  TensorView begin() override {
    const int64_t B = in_.requests();
    int32_t* before = own_->before.as<int32_t>();
    for (int64_t b = 0; b < B; ++b) before[b] = in_.rows.as<int32_t>()[in_.last.as<int32_t>()[b]];
    std::fill_n(own_->gate_up.as<float>(), own_->gate_up.numel(), 1.0f);
    for (int64_t t = 0; t < T_; ++t) {
      const TensorView x = rows_of(own_->x, t * B, B);
      take_rows(in_.hidden_states, before, x);
      add_blocks(w_.heads[t], x);
    }
    for (int64_t first = 0, end; first < T_; first = end) {
      const Projection& product = w_.heads[first].logits;
      for (end = first + 1; end < T_ && same_product(w_.heads[end].logits, product);) ++end;
      const int64_t rows = (end - first) * B;
      multiply(rows_of(own_->x, first * B, rows), product, rows_of(own_->logits, first * B, rows));
    }
    return own_->logits;
  }

  TensorView step(const LevelRows&) override { throw std::logic_error("all levels of heads are known at once"); }

 private:
  void multiply(const TensorView& x, const Projection& product, const TensorView& out) const {
    Workspace space(own_->inputs.as<uint8_t>());
    project(prepared(x, product, space.rows(x.shape[0], x.shape[1], product)), product, out);
  }

  // x += silu(block(x)), block by block.
  void add_blocks(const DraftHead& head, const TensorView& x) const {
    for (const Projection& block : head.blocks) {
      multiply(x, block, own_->gate_up);  // the left half; the right one holds ones
      run_cpu(SiluMul{own_->gate_up, own_->added});
      for (int64_t i = 0; i < x.numel(); ++i) x.as<float>()[i] += own_->added.as<float>()[i];
    }
  }

  const HeadsWeights& w_;
  const DraftInputs& in_;
  Placed<HeadRows> own_;
  int64_t T_;
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
