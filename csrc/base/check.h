// Argument checks that document shapes: a symbolic size binds at its first use and is shared by all tensors of a call,
// so `check(k, "k", {kFloat32}, {B, L, D})` both states and enforces the contract.
#pragma once
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "base/tensor_view.h"
#if defined(SPECENGINE_SIM)
#include "sim/memory.h"
#endif

namespace specengine {

// pybind11 turns std::invalid_argument into Python's ValueError.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

struct Dim {
  const char* name;
  int64_t value = -1;
  const char* bound_by = nullptr;
  operator int64_t() const { return value; }
};

struct DimRef {
  Dim* dim = nullptr;
  int64_t fixed = -1;
  DimRef(Dim& d) : dim(&d) {}
  DimRef(int64_t size) : fixed(size) {}
};

// Whether the CUDA kernels read tensors of this device; in the simulator's build they read all.
inline bool for_cuda([[maybe_unused]] Device device) {
#if defined(SPECENGINE_SIM)
  return true;
#else
  return device == Device::kCuda;
#endif
}

inline void check_aligned(const TensorView& t, const char* name) {
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) fail(name, ": expected memory aligned to 16 bytes");
}

class Checker {
 public:
  void operator()(const TensorView& t, const char* name, std::initializer_list<DType> dtypes,
                  std::initializer_list<DimRef> shape) {
    if (!t.not_a_tensor.empty()) fail(name, ": expected a tensor, got ", t.not_a_tensor);
    if (!t.defined()) fail(name, ": expected a tensor, got None");
    check_dtype(t, name, dtypes);
    if (t.device == Device::kOther) fail(name, ": expected a tensor on cpu or cuda");
    if (device_owner_ == nullptr) {
      device_ = t.device, device_id_ = t.device_id, device_owner_ = name;
    } else if (t.device != device_ || t.device_id != device_id_) {
      fail(name, ": expected device ", name_of(device_), ":", device_id_, " (from ", device_owner_, "), got ",
           name_of(t.device), ":", t.device_id);
    }
    check_shape(t, name, shape);
    check_contiguous(t, name);
#if defined(SPECENGINE_SIM)
    sim::note_tensor(t, name);
#endif
  }

  // Checks an argument that may be None.
  void optional(const TensorView& t, const char* name, std::initializer_list<DType> dtypes,
                std::initializer_list<DimRef> shape) {
    if (t.given()) (*this)(t, name, dtypes, shape);
  }

  Device device() const { return device_; }

  // Whether the CUDA kernels serve the call. Fails before the first tensor, whose device decides.
  bool for_cuda() const {
    if (device_owner_ == nullptr) fail("for_cuda: no tensor was checked yet");
    return specengine::for_cuda(device_);
  }

 private:
  static void check_dtype(const TensorView& t, const char* name, std::initializer_list<DType> dtypes) {
    std::string expected;
    for (DType d : dtypes) {
      if (t.dtype == d) return;
      expected += (expected.empty() ? "" : " or ") + std::string(name_of(d));
    }
    fail(name, ": expected dtype ", expected, ", got ", name_of(t.dtype));
  }

  static std::string shape_of(const TensorView& t) {
    std::string s = "[";
    for (int i = 0; i < t.ndim; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
    return s + "]";
  }

  static std::string text_of(std::initializer_list<DimRef> shape) {
    std::string s = "[", bound;
    for (const DimRef& ref : shape) {
      if (s.size() > 1) s += ", ";
      s += ref.dim ? ref.dim->name : std::to_string(ref.fixed);
      if (ref.dim && ref.dim->value >= 0 && ref.dim->bound_by) {
        bound += (bound.empty() ? " with " : ", ") + std::string(ref.dim->name) + "=" + std::to_string(ref.dim->value) +
                 " (from " + ref.dim->bound_by + ")";
      }
    }
    return s + "]" + bound;
  }

  static void check_shape(const TensorView& t, const char* name, std::initializer_list<DimRef> shape) {
    bool good = t.ndim == static_cast<int>(shape.size());
    int i = 0;
    for (const DimRef& ref : shape) {
      if (!good) break;
      const int64_t expected = ref.dim ? ref.dim->value : ref.fixed;
      if (expected >= 0 && t.shape[i] != expected) good = false;
      ++i;
    }
    if (!good) fail(name, ": expected shape ", text_of(shape), ", got ", shape_of(t));
    i = 0;
    for (const DimRef& ref : shape) {
      if (ref.dim && ref.dim->value < 0) ref.dim->value = t.shape[i], ref.dim->bound_by = name;
      ++i;
    }
  }

  static void check_contiguous(const TensorView& t, const char* name) {
    int64_t expected = 1;
    if (t.numel() == 0) return;
    for (int i = t.ndim - 1; i >= 0; --i) {
      if (t.shape[i] != 1 && t.strides[i] != expected) {
        fail(name, ": expected a contiguous tensor, got stride ", t.strides[i], " in dimension ", i);
      }
      expected *= t.shape[i];
    }
  }

  Device device_ = Device::kOther;
  int device_id_ = 0;
  const char* device_owner_ = nullptr;
};

}  // namespace specengine
