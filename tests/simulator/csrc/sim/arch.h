// Host twins of the functions in cuda/base/arch.cuh. An asynchronous copy moves its bytes at the wait, so a kernel that
// forgets the wait finds nothing there.
#pragma once
#include <source_location>

#include "sim/device.h"

namespace specengine {
namespace sim {

void wait_for_previous_kernel();
void copy_async_16(void* shared, const void* global, bool valid, const Where& where);
void commit_copies();
void wait_for_copies(size_t pending, const Where& where);
void load_matrices(uint32_t (&r)[4], const void* row, bool transposed, const Where& where);
void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*to_float)(uint16_t),
                  const Where& where);
void prefetch_to_l2(const void* p, const Where& where);
uint4 load_streaming(const void* p, const Where& where);

inline float float_of_half(uint16_t bits) { return __half2float({bits}); }
inline float float_of_bfloat16(uint16_t bits) { return __bfloat162float({bits}); }

}  // namespace sim

inline void wait_for_previous_kernel() { sim::wait_for_previous_kernel(); }
inline void let_next_kernel_start() {}
inline void wait_for_its_data() { sim::wait_for_previous_kernel(); }

inline void prefetch_to_l2(const void* p, const sim::Where& where = sim::Where::current()) {
  sim::prefetch_to_l2(p, where);
}

inline uint4 load_streaming(const void* p, const sim::Where& where = sim::Where::current()) {
  return sim::load_streaming(p, where);
}

inline void copy_async_16(void* shared, const void* global, bool valid,
                          const sim::Where& where = sim::Where::current()) {
  sim::copy_async_16(shared, global, valid, where);
}
inline void commit_copies() { sim::commit_copies(); }
template <int pending>
void wait_for_copies(const sim::Where& where = sim::Where::current()) {
  sim::wait_for_copies(pending, where);
}

inline void load_matrices(uint32_t (&r)[4], const void* row, const sim::Where& where = sim::Where::current()) {
  sim::load_matrices(r, row, false, where);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row,
                                     const sim::Where& where = sim::Where::current()) {
  sim::load_matrices(r, row, true, where);
}

template <typename T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const sim::Where& where = sim::Where::current());
template <>
inline void multiply_add<BFloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                   const sim::Where& where) {
  sim::multiply_add(c, a, b, sim::float_of_bfloat16, where);
}
template <>
inline void multiply_add<Half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const sim::Where& where) {
  sim::multiply_add(c, a, b, sim::float_of_half, where);
}

template <typename T>
uint32_t pack_two(float low, float high);
template <>
inline uint32_t pack_two<BFloat16>(float low, float high) {
  return __float2bfloat16_rn(low).bits | static_cast<uint32_t>(__float2bfloat16_rn(high).bits) << 16;
}
template <>
inline uint32_t pack_two<Half>(float low, float high) {
  return __float2half_rn(low).bits | static_cast<uint32_t>(__float2half_rn(high).bits) << 16;
}

}  // namespace specengine
