// Structs of tensors cross as named tuples with one entry per member, which keep their tensors alive: a tuple costs
// less than an object of the core. A struct is such a record if it names its Python class, `kRecord`.
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "base/members.h"
#include "bindings/tensor_caster.h"

namespace specengine {

template <typename T>
concept IsRecord = requires { T::kRecord; };

inline std::string type_name(const TensorView*) { return "Tensor"; }
inline std::string type_name(const OptionalTensor*) { return "Tensor | None"; }
inline std::string type_name(const int64_t*) { return "int"; }
inline std::string type_name(const float*) { return "float"; }
inline std::string type_name(const bool*) { return "bool"; }
inline std::string type_name(const double*) { return "float"; }
inline std::string type_name(const std::string*) { return "str"; }
template <typename Bound>
  requires(!IsRecord<Bound>)
std::string type_name(const Bound*) {  // a class of the module
  return pybind11::type::of<Bound>().attr("__name__").template cast<std::string>();
}
template <typename Item>
std::string type_name(const std::vector<Item>*) {
  return "list[" + type_name(static_cast<Item*>(nullptr)) + "]";
}
template <IsRecord Record>
std::string type_name(const Record*) {
  return Record::kRecord;
}

// Adds a record's class to the module. Its doc is a signature, as pybind11 writes one for a function.
void add_record(pybind11::module_& m, const char* name, const std::vector<std::string>& fields,
                const std::vector<std::string>& types);

template <IsRecord Record>
void add_record(pybind11::module_& m) {
  const auto& names = kMemberNames<Record>;
  std::vector<std::string> types;
  [&]<typename... Members>(const std::tuple<Members...>*) {
    (types.push_back(type_name(static_cast<Members*>(nullptr))), ...);
  }(static_cast<MemberTypes<Record>*>(nullptr));
  add_record(m, Record::kRecord, {names.begin(), names.end()}, types);
}

}  // namespace specengine

namespace pybind11::detail {

template <specengine::IsRecord Record>
struct type_caster<Record> {
  PYBIND11_TYPE_CASTER(Record, const_name(Record::kRecord));

  bool load(handle source, bool convert) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != kCount) return false;
    return load_members(source.ptr(), convert, std::make_index_sequence<kCount>());
  }

 private:
  static constexpr size_t kCount = specengine::kMemberCount<Record>;

  template <typename... Members>
  static std::tuple<make_caster<Members>...> casters_of(const std::tuple<Members...>*);
  // Kept through the call: they own what a tensor's producer has lent.
  decltype(casters_of(static_cast<specengine::MemberTypes<Record>*>(nullptr))) casters_;

  template <size_t... I>
  bool load_members(PyObject* source, bool convert, std::index_sequence<I...>) {
    if (!(std::get<I>(casters_).load(PyTuple_GET_ITEM(source, I), convert) && ...)) return false;
    value =
        Record{cast_op<std::tuple_element_t<I, specengine::MemberTypes<Record>>>(std::move(std::get<I>(casters_)))...};
    return true;
  }
};

}  // namespace pybind11::detail
