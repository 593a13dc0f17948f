// The simulator's own functions in its module: its switches, and kernels for its tests, called by name.
#pragma once
#include <string>

#include "base/tensor_view.h"

namespace pybind11 {
class module_;
}

namespace specengine::sim {

void add_to(pybind11::module_& module);

// planted.h: kernels with one bug each, which `broken` switches on.
void run_planted(const std::string& name, const TensorView& in, const TensorView& out, bool broken);
// traffic.cu: kernels whose traffic is known by hand, with a slow access that `broken` switches on.
void run_traffic(const std::string& name, const TensorView& in, const TensorView& out, bool broken);
// probes.cu: kernels with one function of the device language each.
void run_probe(const std::string& name, const TensorView& in, const TensorView& out);

}  // namespace specengine::sim
