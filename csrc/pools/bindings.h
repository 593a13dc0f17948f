// What drafters without weights remember of texts, as Python sees it.
#pragma once
#include <pybind11/pybind11.h>

namespace specengine {

void add_pools(pybind11::module_& m);

}  // namespace specengine
