// EAGLE's draft with lists for arguments and results. After a target's pass all of Python's memory is cold: every
// array, tensor and function on the way to an op takes microseconds, lists of integers take none.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bindings/tensor_caster.h"
#include "cpu/passes/workspace.h"
#include "ops/draft_tree.h"

namespace specengine {

using Ints = std::vector<int32_t>;

inline TensorView view_of(Ints& values, int64_t rows, int64_t columns) {
  return tensor(values.data(), DType::kInt32, {rows, columns});
}
inline TensorView view_of(Ints& values) {
  return tensor(values.data(), DType::kInt32, {static_cast<int64_t>(values.size())});
}

template <typename Value>
pybind11::list list_of(const Value* values, int64_t count) {
  pybind11::list list(count);
  for (int64_t i = 0; i < count; ++i) list[i] = values[i];
  return list;
}

// The states of a row side by side, as one row.
inline TensorView side_by_side(const TensorView& x) {
  if (x.ndim != 3 || x.strides[2] != 1 || x.strides[1] != x.shape[2]) return x;
  TensorView rows = x;
  rows.ndim = 2, rows.shape[1] *= x.shape[2], rows.strides[1] = 1;
  return rows;
}

// hidden_states: [R, ..].  runs: tokens of each request's pairs.  rows: of hidden_states, one per pair.  pages, cached:
// of each request. nodes: of a tree at most. Returns tokens, parents and chances of each tree, and the number of
// drafted levels.
inline pybind11::tuple draft_lists(const EagleWeights& weights, const std::vector<Ints>& runs,
                                   const TensorView& hidden_states, Ints rows, const std::vector<Ints>& pages,
                                   Ints cached, const TensorView& k_cache, const TensorView& v_cache,
                                   const TensorView& cos, const TensorView& sin, Ints limits,
                                   const std::tuple<int64_t, int64_t, int64_t, int64_t>& sizes,
                                   const std::pair<float, float>& least) {
  const int64_t B = static_cast<int64_t>(runs.size());
  const auto [levels, top_k, beam, nodes] = sizes;
  if (pages.size() != runs.size()) fail("pages: expected ", B, " lists, one per request, got ", pages.size());
  if (nodes < 1 || nodes > kMaxNodes) fail("nodes: expected 1 to ", kMaxNodes, ", got ", nodes);
  Ints tokens, row_start{0}, parents(B * nodes), out_tokens(B * nodes), counts(B), grown(B);
  std::vector<float> chances(B * nodes);
  size_t width = 0;
  for (size_t b = 0; b < runs.size(); ++b) {
    tokens.insert(tokens.end(), runs[b].begin(), runs[b].end());
    row_start.push_back(static_cast<int32_t>(tokens.size()));
    width = std::max(width, pages[b].size());
  }
  Ints table(B * width);
  for (size_t b = 0; b < runs.size(); ++b) std::copy(pages[b].begin(), pages[b].end(), table.begin() + b * width);
  {
    const pybind11::gil_scoped_release released;
    const KvCacheView cache{
        k_cache, v_cache, view_of(table, B, static_cast<int64_t>(width)), view_of(cached), view_of(row_start), 0};
    const DraftedTrees trees{view_of(out_tokens, B, nodes), view_of(parents, B, nodes),
                             tensor(chances.data(), DType::kFloat32, {B, nodes}), view_of(counts), view_of(grown)};
    const TreePlan plan{levels, top_k, beam, least.first, least.second, view_of(limits)};
    const DraftTree op{&weights, view_of(tokens), side_by_side(hidden_states), view_of(rows), cache, cos, sin, plan,
                       trees};
    if (op.validate() != Device::kCpu) fail("hidden_states: expected a tensor on cpu");
    run_cpu(op);
  }
  pybind11::list drafted(B);
  for (int64_t b = 0; b < B; ++b) {
    drafted[b] = pybind11::make_tuple(list_of(out_tokens.data() + b * nodes, counts[b]),
                                      list_of(parents.data() + b * nodes, counts[b]),
                                      list_of(chances.data() + b * nodes, counts[b]));
  }
  return pybind11::make_tuple(drafted, B > 0 ? grown[0] : 0);
}

}  // namespace specengine
