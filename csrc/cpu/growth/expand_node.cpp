// Pass 1, one task per request: the children of its opened node. Pass 2, likewise: the tree.
#include "ops/growth/expand_node.h"

#include <algorithm>
#include <vector>

#include "cpu/best_of_row.h"
#include "cpu/parallel_for.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// The logits of request b; sum: room for them where something is added.
const float* row_of(const LevelLogits& level, int64_t b, std::vector<float>& sum) {
  const int64_t V = level.logits.shape[1];
  const float* x = level.logits.as<float>() + b * V;
  if (!level.delta.given()) return x;
  const float* added = level.delta.as<float>() + b * V;
  sum.resize(V);
  std::transform(x, x + V, added, sum.begin(), [](float a, float b) { return a + b; });
  return sum.data();
}

void begin(const ExpandNode& op, PathGrowth& growth) {
  const int64_t columns = growth.tree.most;
  std::fill_n(growth.tokens, columns, -1), std::fill_n(growth.scores, columns, 0.0f);
  std::fill_n(growth.tree.nodes.parents, columns, -1), std::fill_n(growth.tree.nodes.depths, columns, -1);
  growth.tree.begin();
  growth.tokens[0] = op.roots.as<int32_t>()[growth.request];
}

}  // namespace

void run(const ExpandNode& op) {
  const int64_t B = op.known.shape[0], V = op.level.logits.shape[1], k = op.parts.tokens.shape[2];
  const int64_t N = op.candidates.tokens.shape[1];
  const PathGrowth all = growth_of(op);
  const DeepestLevel deepest = op.limits.deepest(op.known, op.levels);
  const auto opened = [&](int64_t b) {  // the node whose children come now
    if (deepest.of(static_cast<int>(b)) == 0) return -1;
    return op.step == 0 ? 0 : all.opened[b];
  };
  for (int64_t b = 0; b < B; ++b) {
    std::vector<float> sum;
    if (opened(b) < 0) continue;
    const float* x = row_of(op.level, b, sum);
    if (!has_distribution(x, V)) refuse_row(x, V, b);
  }
  parallel_for(B, [&](int64_t b) {
    const int node = opened(b);
    if (node < 0) return;
    std::vector<float> sum;
    const int64_t list = (b * N + node) * k;
    int32_t* tokens = op.nodes.tokens.as<int32_t>() + list;
    best_of_row(row_of(op.level, b, sum), V, k, tokens, op.nodes.log_probs.as<float>() + list);
    for (int64_t i = 0; i < k && op.token_ids.given(); ++i) tokens[i] = op.token_ids.as<int32_t>()[tokens[i]];
    if (op.level.confidence.given()) {
      op.nodes.confidences.as<float>()[b * N + node] = op.level.confidence.as<float>()[b];
    }
  });
  parallel_for(B, [&](int64_t b) {
    const int node = opened(b), request = static_cast<int>(b), limit = deepest.of(request);
    PathGrowth growth = of_request(all, request, op.step == 0 ? 1 : all.count[b], limit, N);
    if (op.step == 0) begin(op, growth);
    if (node >= 0) {
      growth.advance(static_cast<int>(op.step), node, true, OneThread{});
    } else {
      growth.opened[0] = -1;
      growth.write_row(-1, 0);
    }
  });
}

}  // namespace specengine::SPECENGINE_ISA
