// The functions that the compiler and the linker make the kernels call: before every access, before undefined
// behaviour, and for memcpy and its like. A volatile access counts as atomic, as CUDA treats it.
#include <cstring>

#include "sim/block.h"
#include "sim/memory.h"

namespace sim = specengine::sim;
using sim::Access;

#define SPECENGINE_SIM_HOOK(name, access, bytes)                                      \
  extern "C" void __tsan_##name(void* place) {                                        \
    sim::check(place, bytes, Access::access, sim::Site(__builtin_return_address(0))); \
  }
#define SPECENGINE_SIM_HOOKS(bytes)                          \
  SPECENGINE_SIM_HOOK(read##bytes, kRead, bytes)             \
  SPECENGINE_SIM_HOOK(write##bytes, kWrite, bytes)           \
  SPECENGINE_SIM_HOOK(unaligned_read##bytes, kRead, bytes)   \
  SPECENGINE_SIM_HOOK(unaligned_write##bytes, kWrite, bytes) \
  SPECENGINE_SIM_HOOK(volatile_read##bytes, kAtomic, bytes)  \
  SPECENGINE_SIM_HOOK(volatile_write##bytes, kAtomicInitialise, bytes)
SPECENGINE_SIM_HOOKS(1)
SPECENGINE_SIM_HOOKS(2)
SPECENGINE_SIM_HOOKS(4)
SPECENGINE_SIM_HOOKS(8)
SPECENGINE_SIM_HOOKS(16)

extern "C" {
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* place, size_t bytes) {
  sim::check(place, bytes, Access::kRead, sim::Site(__builtin_return_address(0)));
}
void __tsan_write_range(void* place, size_t bytes) {
  sim::check(place, bytes, Access::kWrite, sim::Site(__builtin_return_address(0)));
}

// The linker sends this module's memcpy, memmove and memset here (--wrap).
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  sim::check(from, bytes, Access::kRead, sim::Site(__builtin_return_address(0)));
  sim::check(to, bytes, Access::kWrite, sim::Site(__builtin_return_address(0)));
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  sim::check(from, bytes, Access::kRead, sim::Site(__builtin_return_address(0)));
  sim::check(to, bytes, Access::kWrite, sim::Site(__builtin_return_address(0)));
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  sim::check(to, bytes, Access::kWrite, sim::Site(__builtin_return_address(0)));
  return __real_memset(to, value, bytes);
}

// GCC's argument begins with the place in the source.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

#define SPECENGINE_SIM_UNDEFINED(text)                                                                       \
  if (!sim::in_kernel) return;                                                                               \
  const sim::Pause pause;                                                                                    \
  const char* const slash = std::strrchr(at->file, '/');                                                     \
  sim::finding(std::string(text) + " at " + (slash ? slash + 1 : at->file) + ":" + std::to_string(at->line), \
               sim::Site(nullptr))
void __ubsan_handle_type_mismatch_v1(const SourceLocation* at, uintptr_t place) {
  SPECENGINE_SIM_UNDEFINED("misaligned access: the address ends in " + std::to_string(place % 16) + " of 16");
}
void __ubsan_handle_out_of_bounds(const SourceLocation* at, intptr_t index) {
  SPECENGINE_SIM_UNDEFINED("index " + std::to_string(index) + " is outside its array");
}
void __ubsan_handle_shift_out_of_bounds(const SourceLocation* at, uintptr_t, intptr_t by) {
  SPECENGINE_SIM_UNDEFINED("shift by " + std::to_string(by) + " bits");
}
void __ubsan_handle_divrem_overflow(const SourceLocation* at, uintptr_t, uintptr_t) {
  SPECENGINE_SIM_UNDEFINED("division by zero");
}
}
