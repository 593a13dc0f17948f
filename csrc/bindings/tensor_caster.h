// pybind11 caster: any DLPack tensor becomes a TensorView. torch publishes a C exchange table, so six tensors
// cross in under a microsecond; other producers (numpy, older torch) go through `__dlpack__`.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>

#include "base/dlpack.h"
#include "base/tensor_view.h"

namespace pybind11::detail {

template <>
struct type_caster<specengine::TensorView> {
  PYBIND11_TYPE_CASTER(specengine::TensorView, const_name("Tensor"));

  // Always succeeds: the op's own check, which knows the argument's name, reports a value that is no tensor.
  bool load(handle source, bool) {
    if (source.is_none()) return true;
    if (const auto* api = exchange_api(Py_TYPE(source.ptr()))) {
      specengine::dlpack::Tensor tensor;
      if (api->tensor_from_py_object_no_sync(source.ptr(), &tensor) != 0) return refuse_pending_error();
      if (wants_gradient(source)) {
        value.not_a_tensor = "a tensor that requires grad; the ops have no gradient, detach() it";
        return true;
      }
      describe(tensor);
      if (value.device == specengine::Device::kCuda) {
        if (api->current_work_stream(tensor.device.type, tensor.device.id, &value.stream) != 0) {
          return refuse_pending_error();
        }
      }
      return true;
    }
    if (!hasattr(source, "__dlpack__")) {
      value.not_a_tensor = Py_TYPE(source.ptr())->tp_name;
      return true;
    }
    try {
      holder_ = source.attr("__dlpack__")();
    } catch (error_already_set& error) {
      return refuse(error);
    }
    auto* managed = static_cast<specengine::dlpack::ManagedTensor*>(PyCapsule_GetPointer(holder_.ptr(), "dltensor"));
    if (managed == nullptr) return refuse_pending_error();
    describe(managed->tensor);  // the capsule still owns it and frees it with holder_, after the call
    if (value.device == specengine::Device::kCuda) {  // a torch without the table; its stream is not the default one
      try {
        const object current = module_::import("torch._C").attr("_cuda_getCurrentRawStream");
        value.stream = reinterpret_cast<void*>(current(value.device_id).cast<uintptr_t>());
      } catch (error_already_set& error) {
        return refuse(error);
      }
    }
    return true;
  }

 private:
  object holder_;

  static const specengine::dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
    // Guarded by the GIL. Types that publish a table are few and live as long as the process.
    static PyTypeObject* cached_type = nullptr;
    static const specengine::dlpack::ExchangeApi* cached = nullptr;
    if (type == cached_type) return cached;
    object capsule = getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", none());
    if (capsule.is_none()) return nullptr;
    void* table = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (table == nullptr) throw error_already_set();
    if (static_cast<const specengine::dlpack::ExchangeApi*>(table)->version.major != 1) return nullptr;
    cached_type = type;
    cached = static_cast<const specengine::dlpack::ExchangeApi*>(table);
    return cached;
  }

  bool refuse_pending_error() { return refuse(error_already_set()); }  // takes the pending Python error

  bool refuse(const error_already_set& error) {
    value.not_a_tensor = error.what();
    value.not_a_tensor.resize(std::min(value.not_a_tensor.find('\n'), value.not_a_tensor.size()));  // no C++ traceback
    return true;
  }

  // The exchange table does not know autograd; `__dlpack__` itself refuses such tensors.
  static bool wants_gradient(handle source) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    const object answer = reinterpret_steal<object>(PyObject_GetAttr(source.ptr(), name));
    if (!answer) PyErr_Clear();
    return answer.ptr() == Py_True;
  }

  void describe(const specengine::dlpack::Tensor& t) {
    using specengine::Device;
    if (t.ndim > specengine::kMaxDims) {
      value.not_a_tensor = "a tensor of more than 6 dimensions";
      return;
    }
    value.ndim = t.ndim;
    value.data = static_cast<char*>(t.data) + t.byte_offset;
    value.device_id = t.device.id;
    value.device = t.device.type == specengine::dlpack::kCpu    ? Device::kCpu
                   : t.device.type == specengine::dlpack::kCuda ? Device::kCuda
                                                                : Device::kOther;
    value.dtype = dtype_of(t.dtype);
    int64_t stride = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      value.shape[i] = t.shape[i];
      value.strides[i] = t.strides ? t.strides[i] : stride;
      stride *= t.shape[i];
    }
    if (t.data == nullptr && value.numel() > 0) {  // torch's fake tensors
      value = {};
      value.not_a_tensor = "a tensor without data";
    }
  }

  static specengine::DType dtype_of(const specengine::dlpack::DataType& t) {
    using specengine::DType;
    namespace dl = specengine::dlpack;
    if (t.lanes != 1) return DType::kOther;
    if (t.code == dl::kFloat && t.bits == 32) return DType::kFloat32;
    if (t.code == dl::kFloat && t.bits == 64) return DType::kFloat64;
    if (t.code == dl::kFloat && t.bits == 16) return DType::kFloat16;
    if (t.code == dl::kBfloat && t.bits == 16) return DType::kBFloat16;
    if (t.code == dl::kInt && t.bits == 32) return DType::kInt32;
    if (t.code == dl::kInt && t.bits == 64) return DType::kInt64;
    if (t.code == dl::kUInt && t.bits == 8) return DType::kUInt8;
    if (t.code == dl::kUInt && t.bits == 16) return DType::kUInt16;
    return DType::kOther;
  }
};

template <>
struct type_caster<specengine::OptionalTensor> {
  PYBIND11_TYPE_CASTER(specengine::OptionalTensor, const_name("Tensor | None"));

  bool load(handle source, bool convert) {
    const bool loaded = tensor_.load(source, convert);
    value = cast_op<specengine::TensorView&>(tensor_);
    return loaded;
  }

 private:
  type_caster<specengine::TensorView> tensor_;  // owns what the tensor's producer has lent
};

}  // namespace pybind11::detail
