#pragma once
#include <pybind11/pybind11.h>

namespace specengine {

void add_files(pybind11::module_& m);

}  // namespace specengine
