// Walks the drafted trees with the target's logits: at each node the sampling parameters shape the distribution, the
// rule decides whether to follow a child, and the walk ends with the bonus token.
//
// Acceptance is decided by the rules in rules/, on both devices. The CPU walks in cpu/verify_tree.cpp. CUDA walks in
// cuda/sampling/walk_notes.cu or, with many rows, verify_rules.cu; for rule `match` in cuda/sampling/verify_tree.cu.
// Random numbers are Philox numbers (base/philox.h). A draw's noise has two levels: the first is keyed (seed, position,
// block of 64 tokens), the second (seed, position, token). Acceptance coins are keyed (seed, root position, node), on a
// stream of their own.
//
// A mask sets the scores of the tokens that it forbids to -inf before the sampling parameters shape them. At the node's
// draft distribution it makes their weights zero after those parameters, because the drafter drew without masks. A node
// that its parent's mask forbids is no child of it.
//
// The CPU samples only nodes on the walk. It refuses values out of range and a walk that meets a node without a token.
// CUDA refuses nothing:
//   - a walk that meets a node without a token ends there with bonus -1;
//   - a row whose token is -1 is padding and never visited; nor is a row outside row_start;
//   - rule `block` takes trees too, as `traversal` does;
//   - a request whose root is padding is idle: path_length 0, bonus -1, path all -1; its history is not read.
#pragma once
#include <vector>

#include "base/check.h"
#include "base/draw_arithmetic.h"
#include "base/isa.h"
#include "base/token_mask.h"
#include "ops/kv_cache.h"
#include "ops/sampling_table.h"

namespace specengine {

// CUDA's notes on a row between the launches of rule `match`.
constexpr int kMaxSlices = 16;
struct Candidate {
  double value;
  int64_t token;
};
struct RowState {
  uint32_t threshold;  // top-k, top-p and min-p keep keys above it, and with that key the tokens up to `last`,
  int32_t last;
  float top, min_p;                  // all of them with at least min_p of the weight of the score `top`
  Candidate candidates[kMaxSlices];  // the winners of parts of the row
};

// CUDA's notes on a node between the launches of other rules. They do not depend on the walk.
constexpr int kMaxParts = 8;
struct RowPart {       // a part of a row
  float best, second;  // largest scores before temperature and filters; best infinite without token: no distribution
  int32_t best_token, second_token;
  uint64_t total, untempered_total;  // of weights: as the parameters shape them; without temperature and filters
  uint64_t moment;                   // of weights times distances to the largest score: entropy follows from it
  Candidate chosen;  // the target's draw; of the drafter, the token of the largest untempered weight that a mask allows
};
struct SideNotes {  // a row of the target or of the drafter
  uint64_t total, untempered_total;
  uint64_t weight, untempered_weight;  // of the node's token in the row of its PARENT
  float best, top;                     // the largest score before temperature, and after it
  int32_t top_token;
  uint32_t threshold;  // as in RowState
  int32_t last;
  int32_t sound;  // whether it is a distribution
};
struct NodeNotes {
  SideNotes sides[2];  // target, drafter
  uint64_t moment;
  uint64_t draft_top_weight, target_at_draft_top;  // untempered
  float second;                                    // the target's second score, before temperature and filters
  int32_t second_token;
  int32_t allowed;  // bits: the parameters leave the target's best token, and its second
  int32_t drawn;    // the target's draw
  int32_t draft_top_token;
  int32_t has_draft, noted;
  int32_t padding;
};
constexpr int kMaxPrepared = 2;
struct RowNotes {
  NodeNotes node;
  RowPart parts[2][kMaxParts];                 // target, drafter
  uint64_t prepared[kMaxPrepared][kMaxParts];  // sums over parts that a rule's `prepare` has asked for
};
constexpr int64_t kRowStateWords = sizeof(RowNotes) / sizeof(int64_t);
static_assert(sizeof(RowState) <= sizeof(RowNotes) && sizeof(RowNotes) % sizeof(int64_t) == 0);

// Weights per token and request that rules other than `match` use, see rules/rows.h; walks with notes keep their log
// there.
constexpr int64_t kWeightPlanes = 4;

// The distributions that children were drafted from.
struct DraftLogits {
  static constexpr char kRecord[] = "DraftLogits";
  OptionalTensor logits;  // [R, C] float32; None: no child was drawn from a distribution
  OptionalTensor rows;    // [M] int32: the row of `logits` that a node's children come from; -1: none
  // [V] int32: the column of a token; -1: the drafter does not know it; None: column = token, C = V
  OptionalTensor token_index;
  bool replacement;  // whether siblings were drawn with replacement

  void validate(Checker& check, Dim& M, Dim& V) const {
    Dim R{"R"}, C{"C"};
    const auto absent = [](const TensorView& t) { return !t.defined() && t.not_a_tensor.empty(); };
    if (absent(logits) && absent(rows) && absent(token_index)) return;
    check(logits, "draft_logits", {DType::kFloat32}, {R, C});
    check(rows, "draft_rows", {DType::kInt32}, {M});
    check.optional(token_index, "draft_index", {DType::kInt32}, {V});
    if (!token_index.defined() && C != V) {
      fail("draft_logits: expected V=", V.value, " columns without a draft_index, got ", C.value);
    }
  }
};

// In place of a bonus token, why there is none: kNoToken where the target's scores are no distribution. On CUDA
// kNoToken stands for all of them.
constexpr int32_t kNoDraft = -2;    // the drafter's scores are no distribution
constexpr int32_t kNoAllowed = -3;  // the mask allows no token with a finite score

// The outcome of the walks.
struct AcceptedPaths {
  static constexpr char kRecord[] = "AcceptedPaths";
  TensorView path;         // [B, N] int32: accepted node indices, root first, then -1
  TensorView path_length;  // [B] int32: root included, so it is also the number of tokens committed
  TensorView bonus;        // [B] int32; negative: the walk ends at a node without a token
  TensorView relaxed;      // [B] int32: accepted tokens that the exact rule would have refused

  void validate(Checker& check, Dim& B, Dim& N) const {
    check(path, "path", {DType::kInt32}, {B, N});
    check(path_length, "path_length", {DType::kInt32}, {B});
    check(bonus, "bonus", {DType::kInt32}, {B});
    check(relaxed, "relaxed", {DType::kInt32}, {B});
  }
};

struct VerifyWorkspace {
  static constexpr char kRecord[] = "VerifyWorkspace";
  TensorView scores;          // [B, V] float32; CUDA: all zero before and after
  TensorView counts;          // [B, V] int32: all zero before and after
  OptionalTensor row_states;  // [M, kRowStateWords] int64; CUDA: `match` needs it, other rules are faster with it
  OptionalTensor weights;     // [B, 4, V] int64; only rules other than `match` need it
};

struct VerifyTree {
  TensorView logits;  // [M, V] float32, one row per node
  SampledTrees trees;
  DraftLogits draft;
  OptionalTensor masks;    // [M, ceil(V / 32)] int32: the tokens each node allows, see base/token_mask.h; None: all
  AcceptedPaths accepted;  // written
  VerifyWorkspace workspace;
  std::string rule;             // its name in rules/rules.h
  std::vector<double> options;  // the rule's parameters

  Device validate() const {
    Checker check;
    Dim M{"M"}, V{"V"}, B{"B"}, N{"N"};
    check(logits, "logits", {DType::kFloat32}, {M, V});
    trees.validate(check, M, B);
    accepted.validate(check, B, N);
    check(workspace.scores, "scores", {DType::kFloat32}, {B, V});
    check(workspace.counts, "counts", {DType::kInt32}, {B, V});
    check.optional(workspace.row_states, "row_states", {DType::kInt64}, {M, kRowStateWords});
    draft.validate(check, M, V);
    check.optional(masks, "masks", {DType::kInt32}, {M, (V + kMaskBits - 1) / kMaskBits});
    if (rule != "match") check(workspace.weights, "weights", {DType::kInt64}, {B, kWeightPlanes, V});
    if (V < 1) fail("scores: expected at least one column");
    return check.device();
  }

  // Of the nodes from a row on.
  TokenMasks masks_of(int64_t row) const {
    if (!masks.defined()) return {};
    return {masks.as<uint32_t>() + row * masks.shape[1], masks.shape[1]};
  }
};

SPECENGINE_CPU_OP(VerifyTree)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const VerifyTree& op);
#endif

}  // namespace specengine
