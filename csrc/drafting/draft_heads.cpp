#include "ops/draft_heads.h"

#include <memory>

#include "drafting/level_children.h"
#include "ops/layer.h"

namespace specengine {
namespace {

// The tensors of T levels of B requests; their rows lie level by level.
struct HeadRows {
  TensorView x, gate_up, added, logits, inputs;

  HeadRows(const HeadsNetwork& network, int64_t B, int64_t T, Workspace& space)
      : x(space.floats({T * B, network.hidden})),
        gate_up(space.floats({B, 2 * network.hidden})),
        added(space.floats({B, network.hidden})),
        logits(space.floats({T * B, network.tokens()})),
        inputs(space.floats({T * B, network.hidden + kBlock})) {}  // room for rows in the form of any projection

  // Brings x to the form that the reader multiplies, until the next call.
  TensorView input_of(const Projection& reader, const TensorView& from) const {
    Workspace space(inputs.as<uint8_t>());
    const TensorView out = space.rows(from.shape[0], from.shape[1], reader);
    prepare_rows(from, reader, out);
    return out;
  }
};

bool same_product(const Projection& a, const Projection& b) {
  bool same = a.weights.size() == b.weights.size() && a.bias.data == b.bias.data;
  for (size_t i = 0; same && i < a.weights.size(); ++i) same = a.weights[i].data == b.weights[i].data;
  return same;
}

// x += silu(block(x)), block by block.
void add_blocks(const DraftHead& head, const HeadRows& own, const TensorView& x) {
  for (const Projection& block : head.blocks) {
    project(own.input_of(block, x), block, own.gate_up);  // the left half; the right one holds ones
    run_cpu(SiluMul{own.gate_up, own.added});
    for (int64_t i = 0; i < x.numel(); ++i) x.as<float>()[i] += own.added.as<float>()[i];
  }
}

}  // namespace

void HeadsNetwork::validate() const {
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

Device DraftHeads::validate() const {
  Checker check;
  Dim B{"B"}, T{"T"}, k{"k"};
  check(rows, "rows", {DType::kFloat32}, {B, network->hidden});
  WrittenLevels{children, scores, {}}.validate(check, B, T, k, network->tokens());
  const int64_t heads = static_cast<int64_t>(network->heads.size());
  if (T > heads) fail("children: expected at most ", heads, " levels, one per head, got ", T.value);
  return check.device();
}

void run_cpu(const DraftHeads& op) {
  const HeadsNetwork& network = *op.network;
  const int64_t B = op.children.shape[0], T = op.children.shape[1], k = op.children.shape[2], C = network.hidden;

  Workspace count(nullptr);
  HeadRows(network, B, T, count), LevelChildren(T * B, k, count);
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[count.used() + 64]);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  Workspace space(memory.get() + (64 - address % 64));
  const HeadRows own(network, B, T, space);
  const LevelChildren best(T * B, k, space);
  std::fill_n(own.gate_up.as<float>(), own.gate_up.numel(), 1.0f);

  for (int64_t t = 0; t < T; ++t) {
    const TensorView x = rows_of(own.x, t * B, B);
    std::copy_n(op.rows.as<float>(), B * C, x.as<float>());
    add_blocks(network.heads[t], own, x);
  }
  for (int64_t first = 0, end; first < T; first = end) {
    const Projection& product = network.heads[first].logits;
    for (end = first + 1; end < T && same_product(network.heads[end].logits, product);) ++end;
    const TensorView x = rows_of(own.x, first * B, (end - first) * B);
    project(own.input_of(product, x), product, rows_of(own.logits, first * B, (end - first) * B));
  }
  best.write(own.logits, {op.children, op.scores, network.vocabulary}, 0, "rows");
}

}  // namespace specengine
