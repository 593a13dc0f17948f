#include "bindings/function.h"

namespace py = pybind11;

namespace specengine {
namespace {

size_t aligned(size_t bytes) {
  constexpr size_t kAlignment = alignof(std::max_align_t);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The keyword argument of this name, or null.
PyObject* find(PyObject* name, PyObject* const* values, PyObject* keywords) {
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < count; ++k) {
    if (PyTuple_GET_ITEM(keywords, k) == name) return values[k];  // interned, as nearly all are
  }
  for (Py_ssize_t k = 0; k < count; ++k) {
    if (PyUnicode_Compare(PyTuple_GET_ITEM(keywords, k), name) == 0) return values[k];
  }
  return nullptr;
}

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  const auto& function = *static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
  try {
    return function.run(function.op_name, Frame(function.signature, given, static_cast<size_t>(count), keywords));
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace

void add_record(py::module_& m, const char* name, const std::vector<std::string>& fields,
                const std::vector<std::string>& types) {
  std::string text;
  py::list names;
  for (size_t i = 0; i < fields.size(); ++i) {
    text += (i > 0 ? ", " : "") + fields[i] + ": " + types[i];
    names.append(fields[i]);
  }
  const py::object type = py::module_::import("collections").attr("namedtuple")(name, names);
  type.attr("__module__") = m.attr("__name__");
  type.attr("__doc__") = py::str(name + ("(" + text) + ")");
  m.attr(name) = type;
}

Signature::Signature(const char* name, size_t struct_bytes, void (*make)(void*), void (*end)(void*))
    : name_(name), frame_bytes_(aligned(struct_bytes)), make_(make), end_(end) {}

void Signature::add(std::string_view name, const Reader& reader, size_t offset) {
  std::string text(name);
  PyObject* const interned = PyUnicode_InternFromString(text.c_str());
  arguments_.push_back({std::move(text), interned, &reader, offset, frame_bytes_});
  frame_bytes_ += aligned(reader.caster_bytes);
}

std::string Signature::doc(const std::string& first, const std::string& result) const {
  std::string text = first;
  for (const Argument& argument : arguments_) {
    text += (text.empty() ? "" : ", ") + argument.name + ": " + argument.reader->type();
  }
  return name_ + "(" + text + ") -> " + result;
}

Frame::Frame(const Signature& signature, PyObject* const* given, size_t count, PyObject* keywords)
    : signature_(signature) {
  const auto& arguments = signature.arguments_;
  const size_t all = count + (keywords == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(keywords)));
  if (all > arguments.size()) {
    throw py::type_error(signature.name_ + "(): expected " + std::to_string(arguments.size()) + " arguments, got " +
                         std::to_string(all));
  }
  if (signature.frame_bytes_ > sizeof(near_)) {
    far_ = std::make_unique<std::byte[]>(signature.frame_bytes_);
    memory_ = far_.get();
  }
  signature.make_(memory_);
  try {
    for (size_t i = 0; i < arguments.size(); ++i) {
      PyObject* const source = i < count ? given[i] : find(arguments[i].interned, given + count, keywords);
      if (source == nullptr) throw py::type_error(signature.name_ + "(): " + arguments[i].name + ": is missing");
      read(i, source);
    }
  } catch (...) {
    end();
    throw;
  }
}

Frame::~Frame() { end(); }

void Frame::end() {
  signature_.end_(memory_);
  for (size_t i = 0; i < made_; ++i) signature_.arguments_[i].reader->end(memory_ + signature_.arguments_[i].caster);
}

void Frame::read(size_t i, py::handle source) {
  const auto& argument = signature_.arguments_[i];
  void* const caster = memory_ + argument.caster;
  argument.reader->make(caster);
  ++made_;
  if (argument.reader->read(caster, source, memory_ + argument.offset)) return;
  throw py::type_error(signature_.name_ + "(): " + argument.name + ": expected " + argument.reader->type() + ", got " +
                       Py_TYPE(source.ptr())->tp_name);
}

void Function::add_to(py::module_& m, const char* name, const char* result) {
  doc = signature.doc("", result);
  definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)), METH_FASTCALL | METH_KEYWORDS,
                doc.c_str()};
  const py::capsule self(this, [](void*) {});
  m.attr(name) =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, self.ptr(), m.attr("__name__").ptr()));
}

}  // namespace specengine
