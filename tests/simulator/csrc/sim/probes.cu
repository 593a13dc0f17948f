// Kernels that call the device language for the tests to compare with Python's arithmetic. What in and out hold is
// said at each; all are int32 or float32.
#include <map>

#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/sampling/rule_rows.cuh"
#include "sim/module.h"

namespace specengine {
namespace {

// in: kind, mask, by, width, value of each lane; out: result of each lane of the mask
__global__ void shuffle(const int* in, int* out) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x, kind = in[0], by = in[2], width = in[3];
  const unsigned mask = static_cast<unsigned>(in[1]);
  if (!(mask >> lane & 1)) return;
  const int64_t value = in[4 + lane];
  out[lane] = static_cast<int>(kind == 0   ? __shfl_sync(mask, value, by + lane, width)
                               : kind == 1 ? __shfl_up_sync(mask, value, by, width)
                               : kind == 2 ? __shfl_down_sync(mask, value, by, width)
                                           : __shfl_xor_sync(mask, value, by, width));
}

// in: mask, value of each lane; out [11, 32]: ballot, any, all, matches of 4 and 8 bytes, add, min, max, and, or, xor,
// twice the value of the next lane of the mask's half warp
__global__ void votes(const int* in, int* out) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x, value = in[1 + lane];
  const unsigned mask = static_cast<unsigned>(in[0]), bits = static_cast<unsigned>(value);
  if (!(mask >> lane & 1)) return;
  out[lane] = static_cast<int>(__ballot_sync(mask, value));
  out[32 + lane] = __any_sync(mask, value);
  out[64 + lane] = __all_sync(mask, value);
  out[96 + lane] = static_cast<int>(__match_any_sync(mask, value));
  out[128 + lane] = static_cast<int>(__match_any_sync(mask, static_cast<long long>(value) << 33));
  out[160 + lane] = __reduce_add_sync(mask, value);
  out[192 + lane] = __reduce_min_sync(mask, value);
  out[224 + lane] = __reduce_max_sync(mask, value);
  out[256 + lane] = static_cast<int>(__reduce_and_sync(mask, bits));
  out[288 + lane] = static_cast<int>(__reduce_or_sync(mask, bits));
  out[320 + lane] = static_cast<int>(__reduce_xor_sync(mask, bits));
}

// Lanes go apart by parity and by half, and meet among themselves. in: value of each lane; out: their sums
__global__ void apart(const int* in, int* out) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x, value = in[lane];
  int sum;
  if (lane % 2 == 0) {
    sum = __reduce_add_sync(0x55555555u, value);
    if (lane < 16) sum = __reduce_add_sync(0x00005555u, sum);
  } else {
    sum = __reduce_add_sync(0xAAAAAAAAu, value);
  }
  __syncwarp();
  out[lane] = sum;
}

// in: value of each of 96 threads; out: and, or, count as every thread sees them, sum and maximum over the block
__global__ void block_votes(const int* in, int* out) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(int, scratch, kWarp);
  const int t = threadIdx.x, value = in[t];
  out[t] = __syncthreads_and(value);
  out[96 + t] = __syncthreads_or(value);
  out[192 + t] = __syncthreads_count(value);
  out[288 + t] = block_reduce<Sum>(value, scratch);
  out[384 + t] = block_reduce<Max>(value, scratch);
}

// out: one word per operation, all threads of 3 blocks on each; in: a distinct number for every thread
__global__ void atomics(const int* in, int* out) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(unsigned, shared, 1);
  const int t = blockIdx.x * blockDim.x + threadIdx.x, value = in[t];
  if (threadIdx.x == 0) shared[0] = 0;
  __syncthreads();
  atomicAdd(&shared[0], 1u);
  atomicAdd(&out[0], value);
  atomicMax(&out[1], value);
  atomicMin(&out[2], value);
  atomicOr(reinterpret_cast<unsigned*>(&out[3]), static_cast<unsigned>(value));
  atomicAdd(reinterpret_cast<float*>(&out[4]), 0.5f);
  atomicMax(reinterpret_cast<unsigned long long*>(&out[6]), static_cast<unsigned long long>(value) << 32);
  atomicAdd(reinterpret_cast<double*>(&out[8]), 0.25);
  int seen = atomicAdd(&out[10], 0), before;  // a lost update here would be one increment less
  do {
    before = seen;
    seen = atomicCAS(&out[10], before, before + 1);
  } while (seen != before);
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(&out[11], static_cast<int>(shared[0]));
}

// The last block to arrive adds up what the others left. in [blocks]; out [blocks]: parts, [blocks + 1]: sum, counter
__global__ void last_block(const int* in, int* out) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(bool, last, 1);
  const int blocks = gridDim.x, b = blockIdx.x;
  if (threadIdx.x == 0) {
    out[b] = in[b];
    __threadfence();
    last[0] = atomicAdd(&out[blocks + 1], 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last[0] || threadIdx.x != 0) return;
  int sum = 0;
  for (int i = 0; i < blocks; ++i) sum += out[i];
  out[blocks] = sum;
  out[blocks + 1] = 0;
}

// in: a [16, 16], b [16, 8], c [16, 8]; out: c + a @ b [16, 8]
template <typename T>
__global__ void product(const float* in, float* out) {
  wait_for_previous_kernel();
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const float *left = in, *right = in + 256, *start = in + 384;
  const auto pair_of_a = [&](int row, int k) { return pack_two<T>(left[16 * row + k], left[16 * row + k + 1]); };
  const auto pair_of_b = [&](int k) { return pack_two<T>(right[8 * k + g], right[8 * (k + 1) + g]); };
  const uint32_t a[4] = {pair_of_a(g, 2 * t), pair_of_a(g + 8, 2 * t), pair_of_a(g, 2 * t + 8),
                         pair_of_a(g + 8, 2 * t + 8)};
  const uint32_t b[2] = {pair_of_b(2 * t), pair_of_b(2 * t + 8)};
  const int at[4] = {8 * g + 2 * t, 8 * g + 2 * t + 1, 8 * (g + 8) + 2 * t, 8 * (g + 8) + 2 * t + 1};
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = start[at[i]];
  multiply_add<T>(c, a, b);
  for (int i = 0; i < 4; ++i) out[at[i]] = c[i];
}

// in: four 8x8 matrices of 16 bits, two to a word [128]; out [2, 32, 4]: registers, plain and transposed
__global__ void matrices(const int* in, int* out) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(uint4, rows, 32);
  const int lane = threadIdx.x;
  copy_async_16(&rows[lane], in + 4 * lane, true);
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
  uint32_t r[4];
  load_matrices(r, &rows[lane]);
  for (int i = 0; i < 4; ++i) out[4 * lane + i] = static_cast<int>(r[i]);
  load_matrices_transposed(r, &rows[lane]);
  for (int i = 0; i < 4; ++i) out[128 + 4 * lane + i] = static_cast<int>(r[i]);
}

// in: 65536 patterns; out [2, 65536]: the float32 patterns of each as float16 and as bfloat16
__global__ void widen(const int* in, int* out) {
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < 65536; i += blockDim.x) {
    const uint16_t bits = static_cast<uint16_t>(in[i]);
    out[i] = __float_as_int(to_float(__ushort_as_half(bits)));
    out[65536 + i] = __float_as_int(to_float(__ushort_as_bfloat16(bits)));
  }
}

// in: 65536 float32 patterns; out [2, 65536]: the nearest float16 and bfloat16
__global__ void narrow(const int* in, int* out) {
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < 65536; i += blockDim.x) {
    const float x = __int_as_float(in[i]);
    out[i] = __half_as_ushort(from_float<Half>(x));
    out[65536 + i] = __bfloat16_as_ushort(from_float<BFloat16>(x));
  }
}

// in: 64 words; out [9, 64]: popc, clz, ffs, brev, umulhi, byte_perm, both funnel shifts, dp4a of a word and the next
__global__ void bits(const int* in, int* out) {
  wait_for_previous_kernel();
  const int t = threadIdx.x, x = in[t], y = in[(t + 1) % 64];
  const unsigned a = static_cast<unsigned>(x), b = static_cast<unsigned>(y);
  const unsigned results[9] = {static_cast<unsigned>(__popc(a)),
                               static_cast<unsigned>(__clz(x)),
                               static_cast<unsigned>(__ffs(x)),
                               __brev(a),
                               __umulhi(a, b),
                               __byte_perm(a, b, 0x6420),
                               __funnelshift_l(a, b, static_cast<unsigned>(t)),
                               __funnelshift_r(a, b, static_cast<unsigned>(t)),
                               static_cast<unsigned>(__dp4a(x, y, 7))};
  for (int i = 0; i < 9; ++i) out[64 * i + t] = static_cast<int>(results[i]);
}

// A row of `in` per block, as many columns as there are threads in all, 256 of them at a time; out: its softmax
__global__ void softmax(const float* in, float* out, int columns) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(float, scratch, kWarp);
  const float* row = in + static_cast<int64_t>(blockIdx.x) * columns;
  float* to = out + static_cast<int64_t>(blockIdx.x) * columns;
  float most = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) most = fmaxf(most, row[i]);
  most = block_reduce<Max>(most, scratch);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += expf(row[i] - most);
  sum = block_reduce<Sum>(sum, scratch);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) to[i] = expf(row[i] - most) / sum;
}

// A row of logits of `in` per block; out, per row, at temperature 0 and then at 1: the token drawn from the whole row,
// from merged parts of it, from these without the last one (planted), and with ties to the later part (planted).
__global__ void row_parts(const float* in, float* out, int columns) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(Candidate, scratch, kWarp);
  constexpr int kParts = 5;
  Row row{};
  row.keep_all();
  row.logits = in + static_cast<int64_t>(blockIdx.x) * columns, row.vocab = columns, row.seed = 7, row.position = 3;
  for (int temperature = 0; temperature < 2; ++temperature) {
    row.temperature = static_cast<float>(temperature);
    const Candidate whole = best_in_part(row, 0, columns, scratch);
    Candidate merged = nothing(), missing = nothing(), reversed = nothing();
    for (int i = 0; i < kParts; ++i) {
      const Part part = part_of_groups(columns, i, kParts);
      const Candidate best = best_in_part(row, part.begin, part.end, scratch);
      merged = better(merged, best);
      if (i + 1 < kParts) missing = better(missing, best);
      if (best.value >= reversed.value) reversed = best;
    }
    const Candidate found[] = {whole, merged, missing, reversed};
    for (int i = 0; i < 4; ++i) {
      const int token = token_in_block(row, found[i], scratch);
      if (threadIdx.x == 0) out[8 * blockIdx.x + 4 * temperature + i] = static_cast<float>(token);
    }
  }
}

struct Shape {
  void (*kernel)(const int*, int*);
  unsigned blocks, threads;
};
const std::map<std::string, Shape> kProbes = {
    {"shuffle", {shuffle, 1, 32}},
    {"votes", {votes, 1, 32}},
    {"apart", {apart, 1, 32}},
    {"atomics", {atomics, 3, 40}},
    {"block_votes", {block_votes, 1, 96}},
    {"last_block", {last_block, 7, 64}},
    {"matrices", {matrices, 1, 32}},
    {"widen", {widen, 1, 256}},
    {"narrow", {narrow, 1, 256}},
    {"bits", {bits, 1, 64}},
};

}  // namespace

void sim::run_probe(const std::string& name, const TensorView& in, const TensorView& out) {
  const auto call = [&](void (*kernel)(const float*, float*)) {
    launch({"probe", 1, 32, 0, nullptr}, kernel, in.as<float>(), out.as<float>());
  };
  if (name == "product_half") return call(product<Half>);
  if (name == "product_bfloat16") return call(product<BFloat16>);
  if (name == "softmax" || name == "row_parts") {
    return launch({"probe", static_cast<unsigned>(in.shape[0]), 256, 0, nullptr},
                  name == "softmax" ? softmax : row_parts, in.as<float>(), out.as<float>(),
                  static_cast<int>(in.shape[1]));
  }
  const Shape& probe = kProbes.at(name);
  launch({"probe", probe.blocks, probe.threads, 0, nullptr}, probe.kernel, in.as<int>(), out.as<int>());
}

}  // namespace specengine
