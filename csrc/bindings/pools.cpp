#include "bindings/pools.h"

#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"
#include "drafting/ngram_index.h"
#include "drafting/phrase_pool.h"
#include "drafting/suffix_automaton.h"
#include "drafting/text_corpus.h"

namespace py = pybind11;

namespace specengine {

namespace {

using Tokens = std::vector<int32_t>;

using Kinds = std::tuple<Tokens, Tokens, Tokens>;  // tokens, parents and kinds of a tree

Kinds lists_of(Continuations tree) { return {std::move(tree.tokens), std::move(tree.parents), std::move(tree.kinds)}; }

// Adds continue_text.
template <typename Text>
void add_continuations(py::class_<Text>& text) {
  text.def(
      "continuations",
      [](const Text& self, const Tokens& context, int32_t nodes, int32_t deepest, int32_t width,
         const std::vector<double>& rates,
         double least) { return lists_of(continue_text(self, context, nodes, deepest, width, rates, least)); },
      py::arg("context"), py::arg("nodes"), py::arg("deepest"), py::arg("width"), py::arg("rates"), py::arg("least"));
  text.def("__len__", &Text::size);
}

template <typename Text>
void append(Text& self, const Tokens& tokens) {
  for (const int32_t token : tokens) self.append(token);
}

}  // namespace

void add_pools(py::module_& m) {
  m.attr("MATCHED") = kMatched;
  m.attr("DEEPEST") = kDeepest;
  m.attr("CONTINUATION_KINDS") = kKinds;

  py::class_<SuffixAutomaton> automaton(m, "SuffixAutomaton");
  automaton.def(py::init<>())
      .def("append", &append<SuffixAutomaton>, py::arg("tokens"))
      .def("cut", &SuffixAutomaton::cut)
      .def(
          "count", [](const SuffixAutomaton& self, const Tokens& string) { return self.count(string); },
          py::arg("string"))
      .def_property_readonly("bytes", &SuffixAutomaton::bytes);
  add_continuations(automaton);

  m.def("sort_suffixes", &sort_suffixes, py::call_guard<py::gil_scoped_release>(), py::arg("tokens"), py::arg("order"));
  py::class_<TextCorpus> corpus(m, "TextCorpus");
  corpus.def(py::init<const TensorView&, const TensorView&>(), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
             py::arg("tokens"), py::arg("order"));
  add_continuations(corpus);

  m.attr("LONGEST_MATCH") = kLongestMatch;
  py::class_<NgramIndex>(m, "NgramIndex")
      .def(py::init<int32_t, int32_t>(), py::arg("min_ngram"), py::arg("max_ngram"))
      .def("append", &append<NgramIndex>, py::arg("tokens"))
      .def(
          "draft",
          [](NgramIndex& self, int32_t most, int32_t nodes, int32_t deepest, const std::vector<double>& rates,
             double least) { return lists_of(self.draft(most, nodes, deepest, rates, least)); },
          py::arg("most"), py::arg("nodes"), py::arg("deepest"), py::arg("rates"), py::arg("least"))
      .def("skip", &NgramIndex::skip)
      .def(
          "judge", [](const NgramIndex& self, const Tokens& committed) { return self.judge(committed); },
          py::arg("committed"))
      .def("__len__", &NgramIndex::size);

  py::class_<PhrasePool>(m, "PhrasePool")
      .def(py::init<int32_t, int32_t, int32_t>(), py::arg("length"), py::arg("width"), py::arg("keys"))
      .def(
          "insert", [](PhrasePool& self, int32_t token, const Tokens& phrase) { self.insert(token, phrase); },
          py::arg("token"), py::arg("phrase"))
      .def(
          "replace",
          [](PhrasePool& self, int32_t token, const Tokens& before, const Tokens& after) {
            self.replace(token, before, after);
          },
          py::arg("token"), py::arg("before"), py::arg("after"))
      .def("newest", &PhrasePool::newest, py::arg("token"), py::arg("most"))
      .def("tokens", &PhrasePool::tokens)
      .def("__len__", &PhrasePool::size)
      .def_property_readonly("length", &PhrasePool::length)
      .def_property_readonly("width", &PhrasePool::width)
      .def_property_readonly("keys", &PhrasePool::keys)
      .def_property_readonly("most_bytes", &PhrasePool::most_bytes);
}

}  // namespace specengine
