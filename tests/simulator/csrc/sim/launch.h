// The simulator's side of cuda/base/device.cuh: launching, the shape of a launch, shared memory.
#pragma once
#include <cstddef>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "sim/types.h"

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace specengine {
namespace sim {

// One declaration of shared memory in the source; its place is fixed for a launch.
struct SharedSite {
  unsigned launch = 0;
  size_t offset = 0;
};
void* shared_memory(SharedSite& site, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared_memory();

void set_multiprocessors(int count);
void set_most_shared_bytes(int bytes);  // that kernels are told of

}  // namespace sim

struct LaunchConfig {
  const char* name;  // of the op, for messages
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};

namespace sim {

// `written`: addresses in the tensors that the kernel may write.
void run_grid(const LaunchConfig& config, void (*body)(void*), void* params, size_t params_bytes,
              const std::vector<const void*>& written);
std::string name_of_block(size_t nth);  // to run

// Collects pointers to non-const data; in a struct, every word that looks like a pointer.
template <typename Param>
void add_written(std::vector<const void*>& written, const Param& param) {
  if constexpr (std::is_pointer_v<Param>) {
    if (!std::is_const_v<std::remove_pointer_t<Param>>) written.push_back(param);
  } else if constexpr (std::is_class_v<Param>) {
    for (size_t at = 0; at + sizeof(void*) <= sizeof(Param); at += sizeof(void*)) {
      const void* pointer;
      std::memcpy(&pointer, reinterpret_cast<const char*>(&param) + at, sizeof(pointer));
      written.push_back(pointer);
    }
  }
}

}  // namespace sim

template <typename... Params, typename... Args>
void launch(const LaunchConfig& config, void (*kernel)(Params...), Args... args) {
  struct Call {
    void (*kernel)(Params...);
    std::tuple<Params...> params;
  } call{kernel, {static_cast<Params>(args)...}};
  std::vector<const void*> written;
  std::apply([&](const auto&... params) { (sim::add_written(written, params), ...); }, call.params);
  sim::run_grid(
      config, [](void* p) { std::apply(static_cast<Call*>(p)->kernel, static_cast<Call*>(p)->params); }, &call,
      sizeof(call), written);
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int) {}
};

int multiprocessors(int device);
inline int64_t l2_bytes(int) { return 50 << 20; }
int most_shared_bytes(int device);

inline bool& programmatic_launch() {
  static bool enabled = false;
  return enabled;
}

}  // namespace specengine

// The array has its type's alignment and no more, as nvcc may place it.
#define SPECENGINE_SHARED(type, name, count)                                                                    \
  struct name##_memory {                                                                                        \
    type value[count];                                                                                          \
  };                                                                                                            \
  static ::specengine::sim::SharedSite name##_site;                                                             \
  auto& name = static_cast<name##_memory*>(::specengine::sim::shared_memory(name##_site, sizeof(name##_memory), \
                                                                            alignof(name##_memory), #name))     \
                   ->value
#define SPECENGINE_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::specengine::sim::dynamic_shared_memory())
