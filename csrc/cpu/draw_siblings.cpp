// One task owns one row of the drafter's logits.
#include "ops/draw_siblings.h"

#include "cpu/check_trees.h"
#include "cpu/parallel_for.h"
#include "cpu/thread_sampler.h"
#include "rules/siblings.h"

namespace specengine::SPECENGINE_ISA {
namespace {

void check_values(const DrawSiblings& op) {
  check_trees(op.trees, op.scores.shape[1]);
  check_index(op.index, "index", op.logits.shape[1]);
  const int64_t B = op.trees.sampling.seed.shape[0];
  const int32_t* row_start = op.trees.row_start.as<int32_t>();
  for (int64_t r = 0; r < op.logits.shape[0]; ++r) {
    const int32_t b = op.requests.as<int32_t>()[r], node = op.nodes.as<int32_t>()[r];
    if (b < 0 || b >= B) fail("requests: entry ", r, " is ", b, ", expected 0 to ", B - 1);
    if (node < 0 || node >= row_start[b + 1] - row_start[b]) {
      fail("nodes: entry ", r, " is ", node, ", request ", b, " has ", row_start[b + 1] - row_start[b], " nodes");
    }
  }
}

}  // namespace

void run(const DrawSiblings& op) {
  check_values(op);
  const int64_t R = op.logits.shape[0], V = op.scores.shape[1], K = op.drawn.shape[1];
  parallel_for(R, [&](int64_t r) {
    const int32_t b = op.requests.as<int32_t>()[r], node = op.nodes.as<int32_t>()[r];
    const int32_t first = op.trees.row_start.as<int32_t>()[b], nodes = op.trees.row_start.as<int32_t>()[b + 1] - first;
    const DraftedTree tree{op.trees.tokens.as<int32_t>() + first, op.trees.parents.as<int32_t>() + first, nodes, {}};
    ThreadSampler sampler(op.trees.sampling, op.trees.history, b, V, op.scores.as<float>() + r * V,
                          op.counts.as<int32_t>() + r * V);
    const float* logits = op.logits.as<float>() + r * op.logits.shape[1];
    uint64_t* weights = op.weights.as<uint64_t>() + r * V;
    int32_t* drawn = op.drawn.as<int32_t>() + r * K;
    std::fill(drawn, drawn + K, kNoToken);
    if (!sampler.load(logits, op.index.as<int32_t>(), tree, node, nullptr, {}, nullptr)) {
      drawn[0] = kUnsound;  // a task must not throw: reported below
      return;
    }
    draw_siblings(sampler, weights, node, static_cast<int>(K), op.replacement, op.as_match, drawn);
  });
  for (int64_t r = 0; r < R; ++r) {
    if (op.drawn.as<int32_t>()[r * K] != kUnsound) continue;
    fail("logits: row ", r, " of the drafter (request ", op.requests.as<int32_t>()[r], ", node ",
         op.nodes.as<int32_t>()[r], ") has NaN or infinite scores, so there is no token to draw");
  }
}

}  // namespace specengine::SPECENGINE_ISA
