// What the simulator's module has beside the ops.
#pragma once
#include <pybind11/pybind11.h>

namespace specengine::sim {

void add_to(pybind11::module_& module);

}  // namespace specengine::sim
