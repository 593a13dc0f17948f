#include "bindings/draft_lists.h"

#include <pybind11/typing.h>

#include <tuple>
#include <variant>

#include "bindings/bind.h"
#include "growth/grow.h"
#include "growth/stop.h"
#include "networks/eagle.h"
#include "networks/fasteagle.h"
#include "networks/glide.h"
#include "networks/heads.h"

namespace py = pybind11;

namespace specengine {
namespace {

using Ints = std::vector<int32_t>;
using Weights = std::variant<const EagleWeights*, const FastEagleWeights*, const HeadsWeights*, const GlideWeights*>;
using Cache = std::tuple<TensorView, TensorView, TensorView, TensorView>;  // see CacheTensors
using Tree = std::tuple<py::typing::List<int>, py::typing::List<int>, py::typing::List<double>>;

TensorView view_of(Ints& values) { return tensor(values.data(), DType::kInt32, {static_cast<int64_t>(values.size())}); }

// The states of a row side by side, as one row.
OptionalTensor side_by_side(const OptionalTensor& x) {
  if (x.ndim != 3 || x.strides[2] != 1 || x.strides[1] != x.shape[2]) return x;
  OptionalTensor rows = x;
  rows.ndim = 2, rows.shape[1] *= x.shape[2], rows.strides[1] = 1;
  return rows;
}

void check_count(const char* name, size_t got, size_t requests) {
  if (got != requests) fail(name, ": expected ", requests, " of them, one per request, got ", got);
}

// The inputs of a draft. runs, pages, cached: of each request.
class InputLists {
 public:
  InputLists(const std::vector<Ints>& runs, Ints rows, const std::vector<Ints>& pages, Ints cached)
      : rows_(std::move(rows)), cached_(std::move(cached)), row_start_{0} {
    if (!pages.empty()) check_count("pages", pages.size(), runs.size());
    check_count("cached", cached_.size(), runs.size());
    size_t width = 0;
    for (const Ints& own : pages) width = std::max(width, own.size());
    table_.resize(runs.size() * width);
    width_ = static_cast<int64_t>(width);
    for (size_t b = 0; b < pages.size(); ++b) std::copy(pages[b].begin(), pages[b].end(), table_.begin() + b * width);
    for (size_t b = 0; b < runs.size(); ++b) {
      if (runs[b].empty()) fail("runs: request ", b, " has no token");
      const int32_t count = static_cast<int32_t>(runs[b].size());
      tokens_.insert(tokens_.end(), runs[b].begin(), runs[b].end());
      for (int32_t depth = 0; depth < count; ++depth) depths_.push_back(depth);
      row_start_.push_back(row_start_.back() + count), last_.push_back(row_start_.back() - 1);
      ends_.push_back(cached_[b] + count);
    }
  }

  // Valid as long as the lists.
  DraftInputs inputs(const OptionalTensor& hidden_states, const std::vector<Cache>& caches) {
    DraftInputs all{view_of(tokens_),
                    view_of(depths_),
                    view_of(row_start_),
                    view_of(last_),
                    view_of(cached_),
                    view_of(ends_),
                    tensor(table_.data(), DType::kInt32, {static_cast<int64_t>(last_.size()), width_}),
                    side_by_side(hidden_states),
                    view_of(rows_),
                    {}};
    for (const auto& [k, v, cos, sin] : caches) all.caches.push_back({k, v, cos, sin});
    return all;
  }

 private:
  Ints rows_, cached_, tokens_, depths_, row_start_, last_, ends_, table_;
  int64_t width_ = 0;
};

// Returns each request's tree, and the number of drafted levels.
std::pair<std::vector<Tree>, int64_t> draft_trees(const Weights& weights, const GrowthShape& shape,
                                                  const std::vector<Ints>& runs, const OptionalTensor& hidden_states,
                                                  Ints rows, const std::vector<Ints>& pages, Ints cached,
                                                  const std::vector<Cache>& caches, Ints limits, int64_t levels,
                                                  float min_gain, float min_reach) {
  InputLists lists(runs, std::move(rows), pages, std::move(cached));
  const auto draft = [&](const auto* network) {
    if (network == nullptr) fail("weights: expected weights of a network, got None");
    const py::gil_scoped_release others_run;
    const DraftInputs inputs = lists.inputs(hidden_states, caches);
    const GrowthLimits until{view_of(limits), levels, min_gain, min_reach};
    const DraftSizes sizes = sizes_of(shape, until, inputs.requests());
    return grow(*open_network(*network, inputs, sizes), inputs, network->vocabulary, shape, until, sizes);
  };
  if (runs.empty()) return {};
  const DraftedTrees drafted = std::visit(draft, weights);
  std::vector<Tree> trees;
  for (size_t b = 0; b < runs.size(); ++b) {
    const auto list_of = [&](const auto& values) {
      py::list list(drafted.counts[b]);
      for (int64_t i = 0; i < drafted.counts[b]; ++i) list[i] = values[b * drafted.nodes + i];
      return py::object(std::move(list));
    };
    trees.emplace_back(list_of(drafted.tokens), list_of(drafted.parents), list_of(drafted.chances));
  }
  return {std::move(trees), drafted.levels};
}

// The rule by which levels end, for trees that Python grows. scores: [B, C].  beam: [B, w].  level: grown so far.
bool pays(const TensorView& scores, const TensorView& beam, int64_t level, float min_gain) {
  Checker check;
  Dim B{"B"}, C{"C"}, w{"w"};
  check(scores, "scores", {DType::kFloat32}, {B, C});
  check(beam, "beam", {DType::kInt32}, {B, w});
  if (check.device() != Device::kCpu) fail("scores: expected a tensor on cpu");
  if (level < 1) fail("level: expected 1 or more, got ", level);
  for (int64_t i = 0; i < beam.numel(); ++i) {
    const int32_t column = beam.as<int32_t>()[i];
    if (column < 0 || column >= C) fail("beam: entry ", i, " is ", column, ", expected 0 to ", C - 1);
  }
  return another_level_pays({{}, {}, {}, scores}, beam, level, min_gain);
}

}  // namespace

void add_networks(py::module_& m) {
  using py::arg;
  bind_class<EagleWeights>(m, "EagleWeights").def("fetch", &EagleWeights::fetch);
  bind_class<FastEagleWeights>(m, "FastEagleWeights");
  bind_class<DraftHead>(m, "DraftHead");
  bind_class<HeadsWeights>(m, "HeadsWeights");
  bind_class<GlideWeights>(m, "GlideWeights");
  bind_class<GrowthShape>(m, "GrowthShape");
  m.def("draft_trees", &draft_trees, arg("weights"), arg("shape"), arg("runs"), arg("hidden_states"), arg("rows"),
        arg("pages"), arg("cached"), arg("caches"), arg("limits"), arg("levels"), arg("min_gain"), arg("min_reach"));
  m.def("another_level_pays", &pays, arg("scores"), arg("beam"), arg("level"), arg("min_gain"));
}

}  // namespace specengine
