// Python functions whose arguments are the members of a struct. Reading an argument is compiled once for its type, and
// calling once for all functions. pybind11's templates are compiled for every function: module.cpp took 26 s with them,
// and takes 19 s.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/members.h"
#include "bindings/records.h"

namespace specengine {

// Reads values of one type by pybind11's caster, which must live through the call: it owns what a tensor's producer has
// lent.
struct Reader {
  std::string (*type)();
  size_t caster_bytes;
  void (*make)(void* caster);
  bool (*read)(void* caster, pybind11::handle source, void* member);
  void (*end)(void* caster);
};

template <typename Member>
bool read_member(void* caster, pybind11::handle source, void* member) {
  using Caster = pybind11::detail::make_caster<Member>;
  if (std::is_pointer_v<Member> && source.is_none()) return false;  // an object of the core must be given
  Caster& reads = *static_cast<Caster*>(caster);
  if (!reads.load(source, true)) return false;
  *static_cast<Member*>(member) = pybind11::detail::cast_op<Member>(reads);
  return true;
}

template <typename Member, typename Caster = pybind11::detail::make_caster<Member>>
inline constexpr Reader kReader{[] { return type_name(static_cast<std::remove_pointer_t<Member>*>(nullptr)); },
                                sizeof(Caster), [](void* caster) { new (caster) Caster(); }, &read_member<Member>,
                                [](void* caster) { static_cast<Caster*>(caster)->~Caster(); }};

// A struct whose members are the arguments of a function or of a class's constructor.
class Signature {
 public:
  Signature(const char* name, size_t struct_bytes, void (*make)(void*), void (*end)(void*));

  // Adds an argument. offset: of the member.
  void add(std::string_view name, const Reader& reader, size_t offset);

  // `name(argument: type, ...) -> result`, as pybind11 writes it. first: an argument before the struct's, or "".
  std::string doc(const std::string& first, const std::string& result) const;

 private:
  friend class Frame;
  struct Argument {
    std::string name;
    PyObject* interned;  // the name
    const Reader* reader;
    size_t offset, caster;  // of the member and its caster, which lies after the struct
  };
  std::string name_;
  std::vector<Argument> arguments_;
  size_t frame_bytes_;
  void (*make_)(void* members);
  void (*end_)(void* members);
};

// The struct and the casters of one call.
class Frame {
 public:
  // Reads the values of all arguments, which lie in `given` as those of a vectorcall do. Raises TypeError.
  Frame(const Signature& signature, PyObject* const* given, size_t count, PyObject* keywords);
  Frame(const Frame&) = delete;
  ~Frame();

  template <typename Struct>
  Struct& as() const {
    return *reinterpret_cast<Struct*>(memory_);
  }

 private:
  void read(size_t i, pybind11::handle source);
  void end();

  const Signature& signature_;
  size_t made_ = 0;
  alignas(std::max_align_t) std::byte near_[6 << 10];  // all but a decoder's passes fit
  std::unique_ptr<std::byte[]> far_;
  std::byte* memory_ = near_;
};

// A function of the module. It is never freed: the module lives as long as the process.
struct Function {
  Signature signature;
  PyObject* (*run)(const char* op_name, const Frame& members);  // releases the GIL, returns a new reference
  const char* op_name;                                          // in messages
  std::string doc = {};
  PyMethodDef definition = {};

  void add_to(pybind11::module_& m, const char* name, const char* result);
};

template <typename Struct>
Signature signature_of(const char* name) {
  Signature signature(
      name, sizeof(Struct), [](void* members) { new (members) Struct{}; },
      [](void* members) { static_cast<Struct*>(members)->~Struct(); });
  const Struct made{};
  std::apply(
      [&]<typename... Members>(const Members&... members) {
        size_t i = 0;
        const auto begin = reinterpret_cast<uintptr_t>(&made);
        (signature.add(kMemberNames<Struct>[i++], kReader<Members>, reinterpret_cast<uintptr_t>(&members) - begin),
         ...);
      },
      members::tie(made));
  return signature;
}

}  // namespace specengine
