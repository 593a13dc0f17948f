// Makes Python functions and classes of structs: the arguments are the struct's members, in order and by name.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "base/check.h"
#include "bindings/records.h"

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

// A member that points to an object of the core must be given.
template <typename Member>
pybind11::arg argument(const std::string& name) {
  pybind11::arg named(name.c_str());
  return std::is_pointer_v<Member> ? named.none(false) : named;
}

// Python's name(members...) calls run(name, Op{members...}) without the GIL.
template <typename Op, typename Run>
void bind_function(pybind11::module_& m, const char* name, const Run& run) {
  const auto names = member_names<Op>();
  [&]<typename... Members, size_t... I>(const std::tuple<Members...>*, std::index_sequence<I...>) {
    m.def(
        name, [name, run](Members... members) { return run(name, Op{std::move(members)...}); },
        pybind11::call_guard<pybind11::gil_scoped_release>(), argument<Members>(names[I])...);
  }(static_cast<MemberTypes<Op>*>(nullptr), std::make_index_sequence<kMemberCount<Op>>());
}

template <typename Op>
void bind_op(pybind11::module_& m, const char* name) {
  bind_function<Op>(m, name, [](const char* op_name, const Op& op) { run_op(op_name, op); });
}

template <typename Op>
void bind_workspace(pybind11::module_& m, const char* name, const char* op_name) {
  bind_function<Op>(m, name, [op_name](const char*, const Op& op) { return workspace_of(op_name, op); });
}

// A class whose objects are made of their members once and checked then; they keep alive what they were made of.
template <typename Object>
pybind11::class_<Object> bind_class(pybind11::module_& m, const char* name) {
  pybind11::class_<Object> type(m, name, pybind11::module_local());
  const auto names = member_names<Object>();
  [&]<typename... Members, size_t... I>(const std::tuple<Members...>*, std::index_sequence<I...>) {
    type.def(pybind11::init([](Members... members) {
               Object object{std::move(members)...};
               if constexpr (requires { object.validate(); }) object.validate();
               return object;
             }),
             pybind11::keep_alive<1, I + 2>()..., argument<Members>(names[I])...);
  }(static_cast<MemberTypes<Object>*>(nullptr), std::make_index_sequence<kMemberCount<Object>>());
  return type;
}

}  // namespace specengine
