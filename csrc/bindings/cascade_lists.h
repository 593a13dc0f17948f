// FastEagle's draft with lists for arguments and results.
#pragma once
#include <cmath>

#include "bindings/pair_lists.h"
#include "ops/draft_cascade.h"

namespace specengine {

// runs, rows, pages, cached: of PairLists; a run's last token is the root. Returns tokens, parents and chances of each
// tree, of whose levels each node but the likeliest is a leaf.
inline pybind11::list cascade_lists(const CascadeNetwork& network, const std::vector<Ints>& runs,
                                    const TensorView& hidden_states, Ints rows, const std::vector<Ints>& pages,
                                    Ints cached, const TensorView& k_cache, const TensorView& v_cache,
                                    const TensorView& cos, const TensorView& sin, const Ints& limits, int64_t levels,
                                    int64_t top_k) {
  const int64_t B = static_cast<int64_t>(runs.size());
  PairLists pairs(runs, std::move(rows), pages, std::move(cached));
  if (limits.size() != runs.size()) fail("limits: expected ", B, " numbers, one per request, got ", limits.size());
  if (levels < 1 || levels > kMaxNodes) fail("levels: expected 1 to ", kMaxNodes, ", got ", levels);
  if (top_k < 1 || top_k > kMaxNodes) fail("top_k: expected 1 to ", kMaxNodes, ", got ", top_k);
  Ints children(B * levels * top_k);
  std::vector<float> scores(children.size());
  {
    const pybind11::gil_scoped_release released;
    const DraftCascade op{&network,
                          pairs.tokens(),
                          hidden_states,
                          pairs.rows(),
                          pairs.cache(k_cache, v_cache),
                          cos,
                          sin,
                          tensor(children.data(), DType::kInt32, {B, levels, top_k}),
                          tensor(scores.data(), DType::kFloat32, {B, levels, top_k})};
    if (op.validate() != Device::kCpu) fail("hidden_states: expected a tensor on cpu");
    run_cpu(op);
  }
  pybind11::list trees(B);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t count = 1 + top_k * std::clamp<int64_t>(limits[b], 0, levels), first = b * levels * top_k;
    Ints nodes{runs[b].back()}, parents{-1};
    std::vector<float> chances{1.0f};
    for (int64_t i = 0; i + 1 < count; ++i) {
      nodes.push_back(children[first + i]), chances.push_back(std::exp(scores[first + i]));
      parents.push_back(static_cast<int32_t>(i < top_k ? 0 : 1 + (i / top_k - 1) * top_k));
    }
    trees[b] = tree_lists(nodes.data(), parents.data(), chances.data(), count);
  }
  return trees;
}

}  // namespace specengine
