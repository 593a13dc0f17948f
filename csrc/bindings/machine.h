// The constants of the ops, the threads, the instruction sets and the build.
#pragma once
#include <pybind11/pybind11.h>

namespace specengine {

void add_machine(pybind11::module_& m);

}  // namespace specengine
