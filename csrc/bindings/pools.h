// The pools of drafters without weights: suffix automaton, text corpus, phrases.
#pragma once
#include <pybind11/pybind11.h>

namespace specengine {

void add_pools(pybind11::module_& m);

}  // namespace specengine
