#include "sim/module.h"

#include "sim/block.h"
#include "sim/launch.h"

namespace specengine::sim {

void add_to(pybind11::module_& module) {
  module.def("set_schedule", &set_schedule, pybind11::arg("seed"));
  module.def("set_multiprocessors", &set_multiprocessors, pybind11::arg("count"));
}

}  // namespace specengine::sim
