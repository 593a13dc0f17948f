// Any rule but `match`, for a kernel that learns at run time which one it walks by. ptxas compiles the functions that a
// kernel calls once for every kernel, and they are most of a walk's code: a kernel for each rule would take minutes.
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "rules/rules.h"

namespace specengine {

template <typename... Rules>
class OneOf {
 public:
  template <typename Rule>
  explicit OneOf(const Rule& rule) {
    static_assert((std::is_same_v<Rule, Rules> || ...) && std::is_trivially_copyable_v<Rule>);
    int place = 0;
    ((place_ = std::is_same_v<Rule, Rules> ? place : place_, ++place), ...);
    std::memcpy(bytes_, &rule, sizeof(Rule));
  }

  // Calls body with the rule.
  template <typename Body>
  __device__ void visit(const Body& body) const {
    int place = 0;
    ((place++ == place_ ? body(*reinterpret_cast<const Rules*>(bytes_)) : void()), ...);
  }

 private:
  alignas(double) unsigned char bytes_[std::max({sizeof(Rules)...})] = {};
  int place_ = 0;
};

using AnyRule = OneOf<Rejection, Lossy, Traversal, Typical, Margin, MarginReference, Cascade>;

}  // namespace specengine
