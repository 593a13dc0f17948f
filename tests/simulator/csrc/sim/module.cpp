#include "sim/module.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"
#include "law/rule_law.h"
#include "sim/block.h"
#include "sim/counters.h"
#include "sim/launch.h"
#include "sim/memory.h"
#include "sim/planted.h"

namespace py = pybind11;

namespace specengine::sim {
namespace {

void begin(const TensorView& in, const TensorView& out) {
  begin_op();
  note_tensor(in, "in");
  note_tensor(out, "out");
}

void note_counter(TensorView out) {
  out.data = out.as<float>() + 3, out.shape[0] = 1;
  note_tensor(out, "arrived");
}

py::dict dict_of(const Traffic& t) {
  py::dict out;
  out["requests"] = t.requests, out["bytes"] = t.bytes, out["sectors"] = t.sectors;
  out["block_sectors"] = t.block_sectors, out["unique_bytes"] = t.unique_bytes;
  return out;
}

py::dict dict_of(const LaunchCounts& c) {
  py::dict out, tensors, shared;
  for (const auto& [name, paths] : c.tensors) {
    py::dict by_path;
    for (const auto& [path, traffic] : paths) by_path[path.c_str()] = dict_of(traffic);
    tensors[name.c_str()] = by_path;
  }
  shared["requests"] = c.shared.requests, shared["wavefronts"] = c.shared.wavefronts;
  shared["least_wavefronts"] = c.shared.least;
  out["op"] = c.op, out["kernel"] = c.kernel, out["blocks"] = c.blocks, out["threads"] = c.threads;
  out["dynamic_shared"] = c.dynamic_shared, out["static_shared"] = c.static_shared;
  out["products"] = c.products, out["copies"] = c.copies, out["shared"] = shared, out["tensors"] = tensors,
  out["rounds"] = c.rounds;
  return out;
}

}  // namespace

void add_to(py::module_& module) {
  module.def("set_schedule", &set_schedule, py::arg("seed"));
  module.def("set_multiprocessors", &set_multiprocessors, py::arg("count"));
  module.def("prefetched_lines", [] { return prefetched_lines; });
  module.def("set_most_shared_bytes", &set_most_shared_bytes, py::arg("bytes"));
  module.def("set_counting", &set_counting, py::arg("on"));
  module.def("counted", [] {
    py::list launches;
    for (const LaunchCounts& each : counted()) launches.append(dict_of(each));
    return launches;
  });
  module.def(
      "traffic",
      [](const std::string& name, const TensorView& in, const TensorView& out, bool broken) {
        begin(in, out);
        run_traffic(name, in, out, broken);
      },
      py::arg("name"), py::arg("in"), py::arg("out"), py::arg("broken"));
  module.def(
      "planted",
      [](const std::string& name, const TensorView& in, const TensorView& out, bool broken) {
        begin(in, out);
        if (counts_arrivals(name)) note_counter(out);
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
             py::arg("target_probs"), py::arg("draft_probs"), py::arg("replacement"), py::arg("residual_kept") = false,
             py::arg("masks") = std::vector<std::vector<bool>>());
}

}  // namespace specengine::sim
