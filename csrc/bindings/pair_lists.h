// A draft from pairs of hidden state and token, with lists for arguments and results. After a target's pass all of
// Python's memory is cold: every array, tensor and function on the way to an op takes microseconds, lists of integers
// take none.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "bindings/tensor_caster.h"
#include "cpu/passes/workspace.h"
#include "ops/kv_cache.h"

namespace specengine {

using Ints = std::vector<int32_t>;

inline TensorView view_of(Ints& values, int64_t rows, int64_t columns) {
  return tensor(values.data(), DType::kInt32, {rows, columns});
}
inline TensorView view_of(Ints& values) {
  return tensor(values.data(), DType::kInt32, {static_cast<int64_t>(values.size())});
}

// The unread pairs of some requests. runs: tokens of each request's pairs.  pages, cached: of each request.
// rows: of the hidden states, one per pair.
class PairLists {
 public:
  PairLists(const std::vector<Ints>& runs, Ints rows, const std::vector<Ints>& pages, Ints cached)
      : rows_(std::move(rows)), cached_(std::move(cached)), row_start_{0} {
    if (pages.size() != runs.size()) {
      fail("pages: expected ", runs.size(), " lists, one per request, got ", pages.size());
    }
    for (size_t b = 0; b < runs.size(); ++b) {
      tokens_.insert(tokens_.end(), runs[b].begin(), runs[b].end());
      row_start_.push_back(static_cast<int32_t>(tokens_.size()));
      width_ = std::max(width_, pages[b].size());
    }
    table_.resize(runs.size() * width_);
    for (size_t b = 0; b < runs.size(); ++b) std::copy(pages[b].begin(), pages[b].end(), table_.begin() + b * width_);
  }

  // Views, valid as long as the lists.
  TensorView tokens() { return view_of(tokens_); }
  TensorView rows() { return view_of(rows_); }
  KvCacheView cache(const TensorView& k, const TensorView& v) {
    const int64_t requests = static_cast<int64_t>(row_start_.size()) - 1;
    const TensorView table = view_of(table_, requests, static_cast<int64_t>(width_));
    return {k, v, table, view_of(cached_), view_of(row_start_), 0};
  }

 private:
  Ints rows_, cached_, tokens_, row_start_, table_;
  size_t width_ = 0;
};

// The first nodes of a tree as three lists.
inline pybind11::tuple tree_lists(const int32_t* tokens, const int32_t* parents, const float* chances, int64_t count) {
  const auto list_of = [count](const auto* values) {
    pybind11::list list(count);
    for (int64_t i = 0; i < count; ++i) list[i] = values[i];
    return list;
  };
  return pybind11::make_tuple(list_of(tokens), list_of(parents), list_of(chances));
}

}  // namespace specengine
