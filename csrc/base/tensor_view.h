// A borrowed tensor: pointer, dtype, shape, strides, device. Knows nothing of Python or torch.
#pragma once
#include <cstdint>
#include <string>

namespace specengine {

enum class DType : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt32, kInt64, kUInt8, kUInt16, kOther };
enum class Device : uint8_t { kCpu, kCuda, kOther };

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kUInt16:
      return "uint16";
    case DType::kOther:
      break;
  }
  return "an unsupported dtype";
}

inline const char* name_of(Device device) {
  return device == Device::kCpu ? "cpu" : device == Device::kCuda ? "cuda" : "an unsupported device";
}

constexpr int kMaxDims = 6;

struct TensorView {
  void* data = nullptr;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements
  int ndim = -1;                   // -1: no tensor was given (None)
  int device_id = 0;
  DType dtype = DType::kOther;
  Device device = Device::kOther;
  void* stream = nullptr;    // the caller's CUDA stream
  std::string not_a_tensor;  // why the argument is none; the check that knows its name reports it

  bool defined() const { return ndim >= 0; }
  bool given() const { return defined() || !not_a_tensor.empty(); }  // anything but None
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    return count;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kUInt16:
      return 2;
    default:
      return 1;
  }
}
inline int64_t bytes_of(const TensorView& t) { return t.numel() * bytes_of(t.dtype); }

// A tensor argument that may be None.
struct OptionalTensor : TensorView {
  OptionalTensor() = default;
  OptionalTensor(const TensorView& tensor) : TensorView(tensor) {}
};

}  // namespace specengine
