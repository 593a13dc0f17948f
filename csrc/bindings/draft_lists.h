// EAGLE's draft with lists for arguments and results.
#pragma once
#include <tuple>

#include "bindings/pair_lists.h"
#include "ops/draft_tree.h"

namespace specengine {

// The states of a row side by side, as one row.
inline TensorView side_by_side(const TensorView& x) {
  if (x.ndim != 3 || x.strides[2] != 1 || x.strides[1] != x.shape[2]) return x;
  TensorView rows = x;
  rows.ndim = 2, rows.shape[1] *= x.shape[2], rows.strides[1] = 1;
  return rows;
}

// hidden_states: [R, ..].  runs, rows, pages, cached: of PairLists. nodes: of a tree at most. Returns tokens, parents
// and chances of each tree, and the number of drafted levels.
inline pybind11::tuple draft_lists(const EagleWeights& weights, const std::vector<Ints>& runs,
                                   const TensorView& hidden_states, Ints rows, const std::vector<Ints>& pages,
                                   Ints cached, const TensorView& k_cache, const TensorView& v_cache,
                                   const TensorView& cos, const TensorView& sin, Ints limits,
                                   const std::tuple<int64_t, int64_t, int64_t, int64_t>& sizes,
                                   const std::pair<float, float>& least) {
  const int64_t B = static_cast<int64_t>(runs.size());
  const auto [levels, top_k, beam, nodes] = sizes;
  PairLists pairs(runs, std::move(rows), pages, std::move(cached));
  if (nodes < 1 || nodes > kMaxNodes) fail("nodes: expected 1 to ", kMaxNodes, ", got ", nodes);
  Ints parents(B * nodes), tokens(B * nodes), counts(B), grown(B);
  std::vector<float> chances(B * nodes);
  {
    const pybind11::gil_scoped_release released;
    const DraftedTrees trees{view_of(tokens, B, nodes), view_of(parents, B, nodes),
                             tensor(chances.data(), DType::kFloat32, {B, nodes}), view_of(counts), view_of(grown)};
    const TreePlan plan{levels, top_k, beam, least.first, least.second, view_of(limits)};
    const DraftTree op{
        &weights, pairs.tokens(), side_by_side(hidden_states), pairs.rows(), pairs.cache(k_cache, v_cache), cos, sin,
        plan,     trees};
    if (op.validate() != Device::kCpu) fail("hidden_states: expected a tensor on cpu");
    run_cpu(op);
  }
  pybind11::list drafted(B);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first = b * nodes;
    drafted[b] = tree_lists(tokens.data() + first, parents.data() + first, chances.data() + first, counts[b]);
  }
  return pybind11::make_tuple(drafted, B > 0 ? grown[0] : 0);
}

}  // namespace specengine
