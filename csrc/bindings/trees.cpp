#include "bindings/trees.h"

#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"
#include "drafting/text_drafts.h"
#include "drafting/tree_rows.h"

namespace py = pybind11;

namespace specengine {

namespace {

using Columns = std::tuple<Ints, Ints, std::vector<double>>;  // tokens, parents and chances

ScoredTree tree_of(Columns columns) {
  auto& [tokens, parents, chances] = columns;
  return {std::move(tokens), std::move(parents), std::move(chances)};
}

Columns columns_of(ScoredTree tree) {
  return {std::move(tree.tokens), std::move(tree.parents), std::move(tree.chances)};
}

Columns join(Columns first, Columns second, bool pooled) {
  return columns_of(join_trees(tree_of(std::move(first)), tree_of(std::move(second)), pooled));
}

std::vector<std::pair<Ints, Ints>> cut(std::vector<Columns> columns, const std::vector<double>& costs, int64_t most) {
  std::vector<ScoredTree> trees;
  for (Columns& each : columns) trees.push_back(tree_of(std::move(each)));
  return cut_trees(trees, costs, most);
}

using Counts = std::vector<std::tuple<std::string, int32_t, Ints>>;  // see SourceNodes

Counts count(const Ints& tokens, const Ints& parents, std::span<const NamedTree> sources, const Ints& accepted) {
  Counts counts;
  for (SourceNodes& each : count_sources(tokens, parents, sources, accepted)) {
    counts.emplace_back(std::move(each.name), each.drafted, std::move(each.path));
  }
  return counts;
}

Counts count_trees(const Ints& tokens, const Ints& parents,
                   const std::vector<std::tuple<std::string, Ints, Ints>>& sources, const Ints& accepted) {
  std::vector<NamedTree> named;
  for (const auto& [name, own, above] : sources) named.push_back({name, own, above});
  return count(tokens, parents, named, accepted);
}

Counts count_texts(const TextDrafts& self, const Ints& tokens, const Ints& parents,
                   const std::vector<std::string>& names, const Ints& accepted) {
  if (names.size() != self.trees().size()) fail("names: expected ", self.trees().size(), ", got ", names.size());
  std::vector<NamedTree> named;
  for (size_t i = 0; i < names.size(); ++i)
    named.push_back({names[i], self.trees()[i].tokens, self.trees()[i].parents});
  return count(tokens, parents, named, accepted);
}

std::vector<std::tuple<int32_t, int32_t, bool>> judge_texts(const TextDrafts& self, const Ints& committed) {
  std::vector<std::tuple<int32_t, int32_t, bool>> verdicts;
  for (const auto& [text, kind, accepted] : self.judge(committed)) verdicts.emplace_back(text, kind, accepted);
  return verdicts;
}

void add_text_drafts(py::module_& m) {
  py::class_<TextDrafts>(m, "TextDrafts")
      .def(py::init([](const std::vector<TextDrafts::Text>& texts, const Ints& context, int32_t nodes, int32_t deepest,
                       int32_t width, const std::vector<std::vector<double>>& rates, double least) {
             for (const TextDrafts::Text& text : texts) {
               if (std::visit([](const auto* each) { return each == nullptr; }, text))
                 fail("texts: expected texts, got None");
             }
             return TextDrafts(texts, context, nodes, deepest, width, rates, least);
           }),
           py::arg("texts"), py::arg("context"), py::arg("nodes"), py::arg("deepest"), py::arg("width"),
           py::arg("rates"), py::arg("least"))
      .def("tree", [](const TextDrafts& self) { return columns_of(self.joint()); })
      .def("judge", &judge_texts, py::arg("committed"))
      .def("count", &count_texts, py::arg("tokens"), py::arg("parents"), py::arg("names"), py::arg("accepted"));
}

}  // namespace

void add_trees(py::module_& m) {
  add_text_drafts(m);
  m.def("join_trees", &join, py::arg("first"), py::arg("second"), py::arg("pooled"));
  m.def("cut_trees", &cut, py::arg("trees"), py::arg("costs"), py::arg("most"));
  m.def("judge_nodes", &judge_nodes, py::arg("tokens"), py::arg("parents"), py::arg("committed"));
  m.def("count_sources", &count_trees, py::arg("tokens"), py::arg("parents"), py::arg("sources"), py::arg("accepted"));
  py::class_<TreeRows>(m, "TreeRows", py::module_local())
      .def(
          py::init<const TensorView&, const TensorView&, const TensorView&, const TensorView&, const OptionalTensor&>(),
          py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
          py::keep_alive<1, 6>(), py::arg("tokens"), py::arg("parents"), py::arg("depths"), py::arg("row_start"),
          py::arg("ancestors"))
      .def(
          "write",
          [](const TreeRows& self, const std::vector<Ints>& tokens, const std::vector<Ints>& parents) {
            self.write(tokens, parents);
          },
          py::arg("tokens"), py::arg("parents"));
}

}  // namespace specengine
