// The verification rules: an include and a line in with_rule each.
#pragma once
#include <string>

#include "base/check.h"
#include "rules/match.h"

namespace specengine {

// Calls body with the rule of that name.
template <typename Body>
void with_rule(const std::string& name, const Body& body) {
  if (name == "match") return body(MatchRule{});
  fail("rule: there is no rule '", name, "'");
}

}  // namespace specengine
