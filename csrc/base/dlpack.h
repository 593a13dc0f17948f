// The part of the DLPack ABI (version 1) through which tensors cross: https://dmlc.github.io/dlpack/latest/
// Written out here so that the build needs neither torch nor another package. Field order is the ABI.
#pragma once
#include <cstdint>

namespace specengine::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means contiguous
  uint64_t byte_offset;
};

struct ManagedTensor {  // the content of an unversioned `__dlpack__()` capsule
  Tensor tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor*);
};

// The exchange table that a tensor type publishes as `__dlpack_c_exchange_api__`: borrowing a tensor costs one C call.
struct ExchangeApi {
  struct {
    uint32_t major, minor;
  } version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*tensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

}  // namespace specengine::dlpack
