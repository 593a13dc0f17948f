// Makes Python functions and classes of structs: the arguments are the struct's members, in order and by name.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "bindings/function.h"

namespace specengine {

// The one place that chooses a backend: the CUDA kernels are all that the simulator's module has.
template <typename Op>
bool runs_on_cuda(const Op& op) {
#if defined(SPECENGINE_SIM)
  sim::begin_op();
#endif
  return for_cuda(op.validate());
}

[[noreturn]] inline void fail_without_kernel(const char* name, const char* backend) {
  throw std::runtime_error(std::string(name) + ": no " + backend + " kernel in this build");
}

template <typename Op>
void run_op(const char* name, const Op& op) {
  if (!runs_on_cuda(op)) {
    if constexpr (requires { run_cpu(op); }) return run_cpu(op);
    fail_without_kernel(name, "CPU");
  }
#if defined(SPECENGINE_HAVE_CUDA)
  if constexpr (requires { run_cuda(op); }) return run_cuda(op);
#endif
  fail_without_kernel(name, "CUDA");
}

// Floats of workspace that an op needs for its arguments: none on the CPU.
template <typename Op>
int64_t workspace_of(const char* name, const Op& op) {
  if (!runs_on_cuda(op)) return 0;
#if defined(SPECENGINE_HAVE_CUDA)
  if constexpr (requires { workspace_floats(op); }) return workspace_floats(op);
#endif
  fail_without_kernel(name, "CUDA");
}

// Python's name(members...) calls Run::call(op_name, Op{members...}) without the GIL.
template <typename Op, typename Run>
void bind_function(pybind11::module_& m, const char* name, const char* op_name) {
  using Result = decltype(Run::call(op_name, std::declval<const Op&>()));
  constexpr bool kCounts = !std::is_void_v<Result>;
  const auto run = [](const char* called, const Frame& members) -> PyObject* {
    if constexpr (kCounts) {
      return PyLong_FromLongLong(Run::call(called, members.as<Op>()));
    } else {
      pybind11::gil_scoped_release others_run;
      Run::call(called, members.as<Op>());
    }
    Py_RETURN_NONE;
  };
  (new Function{signature_of<Op>(name), run, op_name})->add_to(m, name, kCounts ? "int" : "None");
}

struct RunOp {
  template <typename Op>
  static void call(const char* name, const Op& op) {
    run_op(name, op);
  }
};
template <typename Op>
void bind_op(pybind11::module_& m, const char* name) {
  bind_function<Op, RunOp>(m, name, name);
}

struct CountFloats {
  template <typename Op>
  static int64_t call(const char* name, const Op& op) {
    return workspace_of(name, op);
  }
};
template <typename Op>
void bind_workspace(pybind11::module_& m, const char* name, const char* op_name) {
  bind_function<Op, CountFloats>(m, name, op_name);
}

// A class whose objects are made of their members once and checked then; they keep alive what they were made of.
template <typename Object>
pybind11::class_<Object> bind_class(pybind11::module_& m, const char* name) {
  namespace py = pybind11;
  py::class_<Object> type(m, name, py::module_local());
  const auto& signature = *new Signature(signature_of<Object>("__init__"));
  py::options options;
  options.disable_function_signatures();
  type.def(py::init([&signature](const py::args& args, const py::kwargs& kwargs) {
             py::list values = args;
             py::list keywords;
             for (const auto& [key, value] : kwargs) keywords.append(key), values.append(value);
             const py::tuple given(values), names(keywords);
             const Frame members(signature, &PyTuple_GET_ITEM(given.ptr(), 0), args.size(), names.ptr());
             Object& object = members.as<Object>();
             if constexpr (requires { object.validate(); }) object.validate();
             return std::move(object);
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), signature.doc("self: object", "None").c_str());
  return type;
}

}  // namespace specengine
