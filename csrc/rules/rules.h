// The verification rules: an include and a line in with_rule each, and a name in AnyRule of csrc/cuda/sampling. Their
// step() or verdict() decides acceptance on CPU and CUDA; ops/verify_tree.h names the files that call them.
#pragma once
#include <string>
#include <vector>

#include "base/check.h"
#include "rules/cascade.h"
#include "rules/margin.h"
#include "rules/margin_reference.h"
#include "rules/match.h"
#include "rules/rejection.h"
#include "rules/traversal.h"
#include "rules/typical.h"

namespace specengine {

// Calls body with the rule of that name; options: its parameters, which specengine/rules checks and documents.
template <typename Body>
void with_rule(const std::string& name, const std::vector<double>& options, const Body& body) {
  const auto is = [&](const char* rule, size_t count) {
    if (name != rule) return false;
    if (options.size() != count) fail("options: rule ", name, " takes ", count, " numbers, got ", options.size());
    return true;
  };
  if (is("match", 0)) return body(Match{});
  if (is("rejection", 0)) return body(Rejection{});
  if (is("block", 0) || is("traversal", 0)) return body(Traversal{});
  if (is("margin_strict", 1)) return body(Margin{static_cast<float>(options[0]), true});
  if (is("margin_lossless_base", 1)) return body(Margin{static_cast<float>(options[0]), false});
  if (is("margin_reference", 1)) return body(MarginReference{static_cast<float>(options[0])});
  if (is("typical", 2)) return body(Typical{options[0], options[1]});
  if (is("lossy", 2)) return body(Lossy{options[0], options[1]});
  if (is("chow", 1)) return body(Cascade{Deferral::kChow, options[0]});
  if (is("diff", 1)) return body(Cascade{Deferral::kDiff, options[0]});
  if (is("opt", 1)) return body(Cascade{Deferral::kOpt, options[0]});
  if (is("token_v1", 1)) return body(Cascade{Deferral::kTokenV1, options[0]});
  if (is("token_v2", 1)) return body(Cascade{Deferral::kTokenV2, options[0]});
  if (is("token_v3", 1)) return body(Cascade{Deferral::kTokenV3, options[0]});
  if (is("bild", 1)) return body(Cascade{Deferral::kBild, options[0]});
  fail("rule: there is no rule '", name, "'");
}

}  // namespace specengine
