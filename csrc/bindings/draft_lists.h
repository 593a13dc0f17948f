// Drafts by the networks of the core, with lists for arguments and results. After a target's pass all of Python's
// memory is cold: every array, tensor and function on the way to an op takes microseconds, lists of integers take none.
#pragma once
#include <pybind11/pybind11.h>

namespace specengine {

// Adds the classes of the networks' weights, and the call that drafts by them.
void add_networks(pybind11::module_& m);

}  // namespace specengine
