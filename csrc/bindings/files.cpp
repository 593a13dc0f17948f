// What readers of files would do too slowly in Python.
#include "bindings/files.h"

#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "base/checksum.h"
#include "base/mapped_file.h"
#include "bindings/tensor_caster.h"

namespace py = pybind11;

namespace specengine {
namespace {

// Up to `most` strings of a GGUF header from the start of `data`, and the number of bytes they take. A string is 8
// bytes of length, then UTF-8; this stops before one that is not whole or is not UTF-8.
py::tuple read_strings(const py::bytes& data, int64_t most) {
  char* at = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(data.ptr(), &at, &size) != 0) throw py::error_already_set();
  py::list strings;
  Py_ssize_t used = 0;
  for (int64_t i = 0; i < most; ++i) {
    uint64_t length = 0;
    if (size - used < static_cast<Py_ssize_t>(sizeof(length))) break;
    std::memcpy(&length, at + used, sizeof(length));
    const Py_ssize_t begin = used + static_cast<Py_ssize_t>(sizeof(length));
    if (length > static_cast<uint64_t>(size - begin)) break;
    PyObject* text = PyUnicode_DecodeUTF8(at + begin, static_cast<Py_ssize_t>(length), nullptr);
    if (text == nullptr) {
      if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw py::error_already_set();
      PyErr_Clear();
      break;
    }
    strings.append(py::reinterpret_steal<py::str>(text));
    used = begin + static_cast<Py_ssize_t>(length);
  }
  return py::make_tuple(strings, used);
}

uint64_t checksum_of(const TensorView& data) {
  Checker check;
  Dim N{"N"};
  check(data, "data", {DType::kUInt8}, {N});
  if (for_cuda(check.device())) fail("data: expected a tensor on cpu");
  return checksum(data.as<uint8_t>(), N);
}

}  // namespace

void add_files(py::module_& m) {
  m.def("read_strings", &read_strings, py::arg("data"), py::arg("most"));
  m.def("checksum", &checksum_of, py::arg("data"), py::call_guard<py::gil_scoped_release>());
  py::class_<MappedFile>(m, "MappedFile", py::buffer_protocol(), py::module_local())
      .def(py::init<int, int64_t>(), py::arg("descriptor"), py::arg("size"))
      .def_property_readonly("size", &MappedFile::size)
      .def("use_large_pages", &MappedFile::use_large_pages, py::arg("begin"), py::call_guard<py::gil_scoped_release>())
      .def_buffer([](MappedFile& file) { return py::buffer_info(file.data(), file.size()); });
}

}  // namespace specengine
