// Drafted trees with lists for arguments and results; see draft_lists.h for why.
#pragma once
#include <pybind11/pybind11.h>

namespace specengine {

void add_trees(pybind11::module_& m);

}  // namespace specengine
