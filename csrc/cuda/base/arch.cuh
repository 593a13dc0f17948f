// The only file with inline PTX. Every function has a host twin for the simulator that gives the same result from
// the same lanes' registers.
#pragma once
#include <cstdint>

#include "cuda/base/device.cuh"
#if defined(SPECENGINE_SIM)
#include "sim/arch.h"
#else

namespace specengine {

// First statement of every kernel: with programmatic dependent launch a kernel may start while its predecessor still
// runs. It must neither read nor overwrite the predecessor's data before this returns. Lets the successor start
// likewise.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::
                   : "memory");  // it will wait for this kernel, and so for all before
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same in two halves, for kernels that read weights, which nobody writes, before they wait.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_its_data() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Asks for a line of 128 bytes in L2, and waits for nothing.
__device__ inline void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 16 bytes from global memory that this kernel reads once: no line of L1 is spent on them.
__device__ inline uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Asynchronous copy of 16 bytes from global to shared memory, both 16-byte aligned; zeros where `valid` is false (then
// the source is not read). Finished copies are visible to the block after wait_for_copies and __syncthreads.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` committed groups of this thread are unfinished.
template <int pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements: lanes 8i..8i+7 give the addresses of the rows of matrix i (16 bytes each, in
// shared memory); lane l gets elements (l / 4, 2 * (l % 4)) and the next one of matrix i in r[i]; transposed: elements
// (2 * (l % 4), l / 4) and (2 * (l % 4) + 1, l / 4).
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// c[16, 8] += a[16, 16] @ b[16, 8] of a warp, 16-bit inputs, float32 sums. With g = lane / 4 and t = lane % 4 a lane
// holds
//   a[0]: (g, 2t..)   a[1]: (g + 8, 2t..)   a[2]: (g, 2t + 8..)   a[3]: (g + 8, 2t + 8..)      pairs along k, low half
//   first b[0]: (2t.., g)   b[1]: (2t + 8.., g)                                                      pairs along k
//   c[0], c[1]: (g, 2t), (g, 2t + 1)   c[2], c[3]: (g + 8, 2t), (g + 8, 2t + 1)
template <typename T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ inline void multiply_add<BFloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ inline void multiply_add<Half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two numbers rounded to nearest even, the first one in the low half.
template <typename T>
__device__ inline uint32_t pack_two(float low, float high);
template <>
__device__ inline uint32_t pack_two<BFloat16>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <>
__device__ inline uint32_t pack_two<Half>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

}  // namespace specengine
#endif
