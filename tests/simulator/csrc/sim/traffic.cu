// Kernels for the tests of the counters, whose traffic is known by hand. `broken` switches on what each is named after,
// which leaves the result as it is. in, out: [1024] float; a block of 256 threads.
#include <stdexcept>

#include "cuda/base/arch.cuh"
#include "sim/module.h"

namespace specengine {
namespace {

constexpr int kThreads = 256, kBlocks = 4, kSide = 32;

// A thread copies one element; neighbours read neighbours, or a column of 32 x 32.
__global__ void uncoalesced(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x, row = i / kSide, column = i % kSide;
  const float x = in[broken ? column * kSide + row : i];
  out[broken ? column * kSide + row : i] = x;
}

// A warp transposes 32 x 32 elements through shared memory, with a pitch of 33 or 32. Its stores to `out` are columns.
__global__ void bank_conflict(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, square, kSide*(kSide + 1));
  const int lane = threadIdx.x, pitch = broken ? kSide : kSide + 1;
  for (int row = 0; row < kSide; ++row) square[row * pitch + lane] = in[row * kSide + lane];
  __syncwarp();
  for (int row = 0; row < kSide; ++row) out[lane * kSide + row] = square[lane * pitch + row];
}

// A thread copies 16 bytes; neighbours copy neighbours, or pieces 64 bytes apart.
__global__ void vectors(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int i = threadIdx.x, from = broken ? i % 64 * 4 + i / 64 : i;
  reinterpret_cast<float4*>(out)[from] = reinterpret_cast<const float4*>(in)[from];
}

// A load of every lane, with `broken` at an index that an earlier load gave and the lanes met over.
__global__ void dependent(const float* in, float* out, bool broken) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x;
  const int first = static_cast<int>(in[0]);
  if (broken) __syncwarp();
  const float x = in[broken ? lane + first : lane];
  __syncwarp();
  out[lane] = x;
}

}  // namespace

void sim::run_traffic(const std::string& name, const TensorView& in, const TensorView& out, bool broken) {
  const auto call = [&](void (*kernel)(const float*, float*, bool), unsigned blocks, unsigned threads) {
    launch({"traffic", blocks, threads, 0, nullptr}, kernel, in.as<float>(), out.as<float>(), broken);
  };
  if (name == "uncoalesced") return call(uncoalesced, kBlocks, kThreads);
  if (name == "bank_conflict") return call(bank_conflict, 1, kSide);
  if (name == "vectors") return call(vectors, 1, kThreads);
  if (name == "dependent") return call(dependent, 1, kSide);
  throw std::out_of_range("name: there is no kernel " + name);
}

}  // namespace specengine
