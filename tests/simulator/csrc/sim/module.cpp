#include "sim/module.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"
#include "law/rule_law.h"
#include "sim/block.h"
#include "sim/launch.h"
#include "sim/memory.h"

namespace py = pybind11;

namespace specengine::sim {
namespace {

void begin(const TensorView& in, const TensorView& out) {
  begin_op();
  note_tensor(in, "in");
  note_tensor(out, "out");
}

}  // namespace

void add_to(py::module_& module) {
  module.def("set_schedule", &set_schedule, py::arg("seed"));
  module.def("set_multiprocessors", &set_multiprocessors, py::arg("count"));
  module.def(
      "planted",
      [](const std::string& name, const TensorView& in, const TensorView& out, bool broken) {
        begin(in, out);
        run_planted(name, in, out, broken);
      },
      py::arg("name"), py::arg("in"), py::arg("out"), py::arg("broken"));
  module.def(
      "probe",
      [](const std::string& name, const TensorView& in, const TensorView& out) {
        begin(in, out);
        run_probe(name, in, out);
      },
      py::arg("name"), py::arg("in"), py::arg("out"));
  module.def("rule_law", &rule_law, py::arg("rule"), py::arg("options"), py::arg("parents"), py::arg("tokens"),
             py::arg("target_probs"), py::arg("draft_probs"), py::arg("replacement"), py::arg("residual_kept") = false);
}

}  // namespace specengine::sim
