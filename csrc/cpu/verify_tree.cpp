// One task owns one request: it walks the tree from the root and samples only the nodes that it visits. Acceptance of a
// node is decided in rules/ (rules/walk.h calls the rule), random numbers come from base/philox.h.
#include "ops/verify_tree.h"

#include "cpu/check_trees.h"
#include "cpu/parallel_for.h"
#include "cpu/thread_sampler.h"
#include "rules/rules.h"

namespace specengine::SPECENGINE_ISA {
namespace {

void check_values(const VerifyTree& op) {
  const int64_t M = op.trees.tokens.shape[0], V = op.workspace.scores.shape[1], B = op.accepted.bonus.shape[0];
  check_trees(op.trees, V);
  const int32_t* row_start = op.trees.row_start.as<int32_t>();
  for (int64_t b = 0; b < B; ++b) {
    const int64_t nodes = row_start[b + 1] - row_start[b];
    if (nodes > op.accepted.path.shape[1])
      fail("path: ", op.accepted.path.shape[1], " columns cannot hold a path of ", nodes, " nodes");
  }
  if (!op.draft.logits.defined()) return;
  const int64_t R = op.draft.logits.shape[0];
  for (int64_t m = 0; m < M; ++m) {
    const int32_t row = op.draft.rows.as<int32_t>()[m];
    if (row < -1 || row >= R) fail("draft_rows: entry ", m, " is ", row, ", expected -1 to ", R - 1);
  }
  check_index(op.draft.token_index, "draft_index", op.draft.logits.shape[1]);
}

// Rule `block` is `traversal` of chains.
void check_chains(const VerifyTree& op) {
  const int32_t* row_start = op.trees.row_start.as<int32_t>();
  for (int64_t b = 0; b < op.accepted.bonus.shape[0]; ++b) {
    for (int64_t node = 1; node < row_start[b + 1] - row_start[b]; ++node) {
      if (op.trees.parents.as<int32_t>()[row_start[b] + node] == node - 1) continue;
      fail("parents: rule block takes chains only, request ", b, " has a tree; rule traversal takes trees");
    }
  }
}

// Whether a row has scores, but its mask leaves it none.
bool forbids_all(const uint32_t* mask, const float* logits, int64_t vocab) {
  bool forbids = false;
  for (int64_t v = 0; mask != nullptr && v < vocab; ++v) {
    if (logits[v] == -INFINITY) continue;
    if (is_allowed(mask, v)) return false;
    forbids = true;
  }
  return forbids;
}

template <typename Rule>
Verdict verdict_of(const VerifyTree& op, const Rule& rule, const DraftedTree& tree, int64_t b) {
  const int64_t V = op.workspace.scores.shape[1], first = op.trees.row_start.as<int32_t>()[b];
  const bool drafted = op.draft.logits.defined();
  const LogitRows logits{op.logits.as<float>() + first * V,
                         op.draft.logits.as<float>(),
                         drafted ? op.draft.rows.as<int32_t>() + first : nullptr,
                         op.draft.token_index.as<int32_t>(),
                         V,
                         drafted ? op.draft.logits.shape[1] : 0,
                         op.draft.replacement};
  ThreadSampler sampler(op.trees.sampling, op.trees.history, b, V, op.workspace.scores.as<float>() + b * V,
                        op.workspace.counts.as<int32_t>() + b * V);
  uint64_t* weights =
      op.workspace.weights.defined() ? op.workspace.weights.as<uint64_t>() + b * kWeightPlanes * V : nullptr;
  double values[kMaxNodes];
  int marks[kMaxNodes];
  Rows<ThreadSampler> rows(tree, logits, sampler, weights, values, marks);
  Verdict end = walk(rule, rows);
  if (end.token == kNoToken && forbids_all(tree.masks.row(end.node), logits.target + end.node * V, V)) {
    end.token = kNoAllowed;
    return end;
  }
  if (end.token == kNoToken && Rule::needs.draft && drafted && logits.draft_rows[end.node] >= 0) {
    const float* row = logits.draft + logits.draft_rows[end.node] * logits.columns;
    if (!sampler.load(row, logits.draft_index, tree, end.node, nullptr, {}, nullptr)) end.token = kNoDraft;
  }
  return end;
}

template <typename Rule>
void verify(const VerifyTree& op, const Rule& rule, int64_t b) {
  const int64_t N = op.accepted.path.shape[1];
  const int32_t first = op.trees.row_start.as<int32_t>()[b], nodes = op.trees.row_start.as<int32_t>()[b + 1] - first;
  const DraftedTree tree{op.trees.tokens.as<int32_t>() + first, op.trees.parents.as<int32_t>() + first, nodes,
                         op.masks_of(first)};
  const Verdict end = verdict_of(op, rule, tree, b);
  const int depth = tree.depth(end.node);
  int32_t* path = op.accepted.path.as<int32_t>() + b * N;
  std::fill(path, path + N, -1);
  for (int node = end.node, i = depth; i >= 0; --i, node = tree.parent(node)) path[i] = node;
  // A walk without a token is no failure of the other requests: the path's last entry is the node that has none.
  op.accepted.path_length.as<int32_t>()[b] = depth + 1, op.accepted.bonus.as<int32_t>()[b] = end.token;
  op.accepted.relaxed.as<int32_t>()[b] = end.relaxed;
}

}  // namespace

void run(const VerifyTree& op) {
  check_values(op);
  if (op.rule == "block") check_chains(op);
  const int64_t B = op.accepted.bonus.shape[0];
  with_rule(op.rule, op.options, [&](auto rule) { parallel_for(B, [&](int64_t b) { verify(op, rule, b); }); });
}

}  // namespace specengine::SPECENGINE_ISA
