// What a tree is that grows from known lists of children, and how deep it may be.
#pragma once
#include "base/check.h"
#include "growth/best_first.h"
#include "growth/deepest_level.h"
#include "ops/growth/grow_level.h"

namespace specengine {

// Ranks: node n + 1 is the child of rank ranks[n], see growth/ranks.h.  Backbone: see ExpandBackbone.
// The others: see growth/best_first.h; as many nodes as there are columns, of as many children as lists have.
enum class ShapeKind : int64_t { kRanks, kBackbone, kDdtree, kJetspec, kTop2gap };

struct LevelShape {
  static constexpr char kRecord[] = "LevelShape";
  int64_t kind;               // ShapeKind
  OptionalTensor ranks;       // [N] int32, from 0; of kRanks
  OptionalTensor parents;     // [N] int32, columns before the node's; of kRanks
  OptionalTensor depths;      // [N] int32, from 1; of kRanks
  OptionalTensor thresholds;  // [C] float32, ascending; of kBackbone
  OptionalTensor widths;      // [C + 1] int32, of a level; of kBackbone
  double beta;                // of kTop2gap

  ShapeKind shape() const { return static_cast<ShapeKind>(kind); }
  bool is_best_first() const { return shape() >= ShapeKind::kDdtree; }
  BestFirstKind best_first() const {
    return static_cast<BestFirstKind>(kind - static_cast<int64_t>(ShapeKind::kDdtree));
  }

  // nodes: columns of candidates.
  void validate(Checker& check, Dim& nodes) const {
    Dim N{"N", nodes - 1, "candidates.tokens"}, C{"C"};
    if (kind < 0 || shape() > ShapeKind::kTop2gap) fail("shape.kind: expected 0 to 4, got ", kind);
    if (shape() == ShapeKind::kRanks) {
      check(ranks, "shape.ranks", {DType::kInt32}, {N});
      check(parents, "shape.parents", {DType::kInt32}, {N});
      check(depths, "shape.depths", {DType::kInt32}, {N});
    } else if (shape() == ShapeKind::kBackbone) {
      check(thresholds, "shape.thresholds", {DType::kFloat32}, {C});
      check(widths, "shape.widths", {DType::kInt32}, {C + 1});
    } else if (shape() == ShapeKind::kTop2gap && !(beta > 0 && beta <= 1.7e308)) {
      fail("shape.beta: expected a positive number, got ", beta);
    }
  }
};

// As SelectLimited limits trees; what is None limits nothing.
struct DepthLimits {
  static constexpr char kRecord[] = "DepthLimits";
  OptionalTensor limits;          // [B] int32, deepest depth
  OptionalTensor history_length;  // [B] int32
  OptionalTensor final_length;    // [B] int32, history length at which the request ends
  OptionalTensor active;          // [B] int32, 0: idle

  void validate(Checker& check, Dim& B) const {
    check.optional(limits, "limits.limits", {DType::kInt32}, {B});
    check.optional(final_length, "limits.final_length", {DType::kInt32}, {B});
    check.optional(active, "limits.active", {DType::kInt32}, {B});
    if (final_length.given() || history_length.given()) {
      check(history_length, "limits.history_length", {DType::kInt32}, {B});
    }
  }

  DeepestLevel deepest(const TensorView& known, int64_t levels) const {
    return {known.as<int>(),        limits.as<int>(), history_length.as<int>(),
            final_length.as<int>(), active.as<int>(), static_cast<int>(levels)};
  }
};

}  // namespace specengine
