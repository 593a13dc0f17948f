// The device language of the kernels: CUDA under nvcc, the execution simulator (sim/) under a host compiler. Kernels
// include this instead of CUDA's headers and use CUDA's own names; the differences between the two are here.
#pragma once
#if defined(SPECENGINE_SIM)
#include "sim/device.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

// Shared memory of a block: `type name[count]`, and the launch's dynamic shared bytes as `type* name`. A kernel uses
// the dynamic macro at most once.
#define SPECENGINE_SHARED(type, name, count) __shared__ type name[count]
#define SPECENGINE_DYNAMIC_SHARED(type, name)                                       \
  extern __shared__ __align__(16) unsigned char specengine_dynamic_shared_memory[]; \
  type* const name = reinterpret_cast<type*>(specengine_dynamic_shared_memory)
#endif

#include "base/tensor_view.h"

namespace specengine {

using Half = __half;
using BFloat16 = __nv_bfloat16;

// Calls body with a value of the C++ type of a checked dtype: float32, bfloat16 or float16.
template <typename Body>
void with_float_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float{});
  if (dtype == DType::kBFloat16) return body(BFloat16{});
  body(Half{});
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Half x) { return __half2float(x); }
__device__ inline float to_float(BFloat16 x) { return __bfloat162float(x); }

// Rounds to nearest even.
template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline Half from_float<Half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline BFloat16 from_float<BFloat16>(float x) {
  return __float2bfloat16_rn(x);
}

#if !defined(SPECENGINE_SIM)

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes a tensor's device the current one for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

inline int multiprocessors(int device) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

inline int64_t l2_bytes(int device) {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  return bytes;
}

// Of shared memory, that one block may ask for.
inline int most_shared_bytes(int device) {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

// Whether kernels start before their predecessor ends (programmatic dependent launch); see wait_for_previous_kernel().
// Atomic: one engine may set it while another engine's thread launches.
inline std::atomic<bool>& programmatic_launch() {
  static std::atomic<bool> enabled = false;
  return enabled;
}

struct LaunchConfig {
  const char* name;  // of the op, for messages
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};

// Launches and checks; capturable in a graph.
template <typename... Params, typename... Args>
void launch(const LaunchConfig& config, void (*kernel)(Params...), Args... args) {
  if (config.shared_bytes > 24 * 1024) {  // 48 KB go without asking, static shared memory included
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.shared_bytes)),
               config.name);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = config.grid, launch.blockDim = config.block, launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = static_cast<cudaStream_t>(config.stream);
  launch.attrs = &attribute, launch.numAttrs = programmatic_launch() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, kernel, static_cast<Params>(args)...), config.name);
}

#endif

}  // namespace specengine
