// Rule `cascade` (speculative cascades, Narasimhan et al. 2024, arXiv 2405.19261): rule `rejection` for a mixture of
// target and draft distribution in the target's place. If the deferral rule trusts the drafter, the mixture is the
// drafter's distribution (chow, diff, opt, bild) or has the drafter's probability for trusted tokens (token_v1 to v3).
// Decisions read the distributions without temperature and filters; the mixture is made of those with them.
// Lossy; needs sampled children. The bonus token behind a node without a draft distribution is the target's.
#pragma once
#include "rules/rejection.h"

namespace specengine {

enum class Deferral { kChow, kDiff, kOpt, kTokenV1, kTokenV2, kTokenV3, kBild };

struct Cascade {
  static constexpr Needs needs{.weights = true, .draft = true, .untempered = true};
  Deferral deferral;
  double alpha;  // bild: the least target probability of the drafter's best token that keeps its distribution

  // The part of a step that depends on the loaded node alone, not on the walk, and how many sums over the vocabulary it
  // may ask for.
  template <typename Rows>
  SPECENGINE_HOST_DEVICE void prepare(Rows& rows) const {
    if (rows.has_draft()) mix(rows);
  }
  int prepared_sums() const {
    switch (deferral) {
      case Deferral::kChow:
      case Deferral::kDiff:
      case Deferral::kBild:
        return 0;
      case Deferral::kOpt:
        return 1;
      default:
        return 2;
    }
  }

  template <typename Rows>
  SPECENGINE_HOST_DEVICE Step step(Rows& rows, int node) const {
    prepare(rows);
    const bool mixed = rows.changed();
    return reject_in_turn(rows, node,
                          [&](int token) { return mixed ? rows.processed_prob(token) : rows.target_prob(token); });
  }

 private:
  template <typename Rows>
  SPECENGINE_HOST_DEVICE void mix(Rows& rows) const {
    const double target_top = rows.untempered_target_top(), draft_top = rows.untempered_draft_top();
    const auto keep = [&](bool kept) {
      if (kept) rows.keep_draft();
    };
    switch (deferral) {
      case Deferral::kChow:
        return keep(draft_top >= 1 - alpha);
      case Deferral::kDiff:
        return keep(draft_top >= target_top - alpha);
      case Deferral::kOpt: {
        const double distance = rows.distance();  // 0: the two are equal, and alpha may be infinite
        return keep(distance > 0 && draft_top >= target_top - product(alpha, distance));
      }
      case Deferral::kBild:
        return keep(rows.untempered_target_prob(rows.draft_top_token()) >= alpha);
      case Deferral::kTokenV1:
        return rows.mix(Side::kDraft, target_top - alpha);
      case Deferral::kTokenV2:
        return rows.mix(Side::kTarget, target_top - alpha);
      case Deferral::kTokenV3:
        return rows.mix(Side::kTarget, (1 - alpha) * target_top);
    }
  }
};

}  // namespace specengine
