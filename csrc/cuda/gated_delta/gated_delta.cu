// A pass of one layer in two kernels. The first writes the records: a warp owns one head of q, k or v of a row, or all
// gates of it. The second walks paths from the committed state: a block owns a value head of a path.
//
// Trees have a path for every leaf, and paths walk side by side. Steps that several paths share are repeated, with the
// same bits. So the time is that of the deepest path, and no state but the committed one is ever in memory. Of the
// paths through a node the one with the last leaf writes its output. Floor: the committed states once, for every leaf
// from the second cache.
#include "cuda/base/request_of_row.cuh"
#include "cuda/gated_delta/delta_step.cuh"
#include "ops/gated_delta/gated_delta.h"

namespace specengine {
namespace delta {
namespace {

constexpr int kWarps = 4;
constexpr int kMaskWords = kMaxNodes / 32;
constexpr float kNormEps = 1e-6f;  // of q and k, fixed by the architecture

struct Pass {
  Heads heads;
  const float *rows, *conv, *decay, *dt_bias, *norm;
  float *states, *inputs, *records;  // of the layer; states and inputs of the first slot
  const int *slots, *row_start;
  const unsigned* ancestors;
  int64_t slot_state, slot_inputs;  // floats from one slot to the next
  int row_columns, batch, words;
  bool final;
  float eps;

  __device__ const float* row(int m) const { return rows + static_cast<int64_t>(m) * row_columns; }
  __device__ float* record(int m) const { return records + m * heads.record_floats(); }
  __device__ const unsigned* bits(int m) const { return ancestors + static_cast<int64_t>(m) * words; }
  __device__ float* state(int b, int head) const {
    return states + slots[b] * slot_state + static_cast<int64_t>(head) * heads.key_dim * heads.value_dim;
  }
  __device__ float* last_inputs(int b) const { return inputs + slots[b] * slot_inputs; }
};

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The node before one on its path, -1: none. bits: null for a chain.
__device__ inline int node_before(const unsigned* bits, int node) {
  if (bits == nullptr || node <= 0) return node - 1;
  int word = node / 32;
  unsigned below = bits[word] & ((1u << node % 32) - 1);
  while (below == 0 && word > 0) below = bits[--word];
  return below == 0 ? -1 : 32 * word + 31 - __clz(below);
}

// The node after one on a path, -1: none.
__device__ inline int node_after(const unsigned* bits, int words, int node) {
  int word = node / 32;
  unsigned above = bits[word] & ~((2u << node % 32) - 1);  // 2u << 31 is 0, and nothing of this word is above
  while (above == 0 && word + 1 < words) above = bits[++word];
  return above == 0 ? -1 : 32 * word + __ffs(above) - 1;
}

// The convolution of a row with its ancestors' inputs, and SiLU; heads of q and k get length 1.
__device__ inline void convolve(const Pass& op, int request, int m, const unsigned* bits, int part) {
  const Heads& h = op.heads;
  const int first_row = op.row_start[request], lane = threadIdx.x % kWarp;
  const float* taps[kConvWidth];
  int node = m - first_row, committed = kConvWidth - 2;
#pragma unroll
  for (int t = kConvWidth - 1; t >= 0; --t) {
    taps[t] =
        node < 0 ? op.last_inputs(request) + static_cast<int64_t>(committed--) * h.channels : op.row(first_row + node);
    if (node >= 0) node = node_before(bits, node);
  }
  const bool is_value = part >= 2 * h.key_heads;
  const int size = is_value ? h.value_dim : h.key_dim;
  const int first = is_value ? 2 * h.key_heads * h.key_dim + (part - 2 * h.key_heads) * h.value_dim : part * h.key_dim;
  float* record = op.record(m);
  float activated[kMaxDeltaDim / kWarp];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kMaxDeltaDim / kWarp; ++j) {
    const int i = lane + j * kWarp, c = first + i;
    activated[j] = 0;
    if (i >= size) continue;
    float sum = op.conv[c] * taps[0][c];
#pragma unroll
    for (int t = 1; t < kConvWidth; ++t) sum = fmaf(op.conv[t * h.channels + c], taps[t][c], sum);
    record[c] = taps[kConvWidth - 1][c];
    activated[j] = silu(sum);
    squares = fmaf(activated[j], activated[j], squares);
  }
  const float length = sqrtf(warp_reduce<Sum>(squares) + kNormEps);
  const float factor = part < h.key_heads ? 1.0f / sqrtf(static_cast<float>(h.key_dim)) : 1.0f;
  const float scale = is_value ? 1.0f : factor / length;
#pragma unroll
  for (int j = 0; j < kMaxDeltaDim / kWarp; ++j) {
    const int i = lane + j * kWarp;
    if (i < size) record[h.channels + first + i] = activated[j] * scale;
  }
}

__device__ inline void write_gates(const Pass& op, int m) {
  const Heads& h = op.heads;
  const float* rate = op.row(m) + h.channels + h.value_heads * h.value_dim;
  const float* step = rate + h.value_heads;
  float* gates = op.record(m) + 2 * h.channels;
  for (int head = threadIdx.x % kWarp; head < h.value_heads; head += kWarp) {
    gates[head] = expf(op.decay[head] * softplus(step[head] + op.dt_bias[head]));
    gates[h.value_heads + head] = 1.0f / (1.0f + expf(-rate[head]));
  }
}

__global__ void __launch_bounds__(kWarps* kWarp) record_kernel(const Pass op) {
  wait_for_previous_kernel();
  const int m = blockIdx.x, part = blockIdx.y * kWarps + threadIdx.x / kWarp;
  const int parts = 2 * op.heads.key_heads + op.heads.value_heads;
  if (part > parts) return;
  const int request = request_of_row(op.row_start, op.batch, m);
  const unsigned* bits = op.ancestors == nullptr ? nullptr : op.bits(m);
  if (request == op.batch || (bits != nullptr && bits[0] == 0)) return;  // padding
  part < parts ? convolve(op, request, m, bits, part) : write_gates(op, m);
}

// The nodes of the path to row m, and those of them whose output it writes: no later path has them. Shared, and the
// block's threads may read them.
__device__ inline void find_path(const Pass& op, int m, int end, unsigned* path, unsigned* written) {
  const int lane = threadIdx.x % kWarp;
  for (int word = threadIdx.x / kWarp; word < op.words; word += blockDim.x / kWarp) {
    unsigned later = 0;
    for (int other = m + 1 + lane; other < end; other += kWarp) later |= op.bits(other)[word];
    later = __reduce_or_sync(kAllLanes, later);
    if (lane == 0) path[word] = op.bits(m)[word], written[word] = op.bits(m)[word] & ~later;
  }
  __syncthreads();
}

// Gives a head of a row its output; sums: shared, a number for each warp. Has a barrier, after which sums are read.
template <typename Out>
__device__ inline void write_output(const Pass& op, int m, int head, float output, float* sums, Out* out) {
  const Heads& h = op.heads;
  const int column = Column::number(), warps = blockDim.x / kWarp;
  const bool writes = threadIdx.x % kWarp < kColumns && column < h.value_dim;
  const float z = writes ? op.row(m)[h.channels + head * h.value_dim + column] : 0.0f;
  const float norm = writes ? op.norm[column] : 0.0f;
  float squares = output * output;
#pragma unroll
  for (int offset = 1; offset < kColumns; offset *= 2) squares += __shfl_xor_sync(kAllLanes, squares, offset);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = squares;
  __syncthreads();
  float total = sums[0];
  for (int warp = 1; warp < warps; ++warp) total += sums[warp];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(h.value_dim) + op.eps);
  const int64_t at = (static_cast<int64_t>(m) * h.value_heads + head) * h.value_dim + column;
  if (writes) out[at] = from_float<Out>(output * scale * norm * silu(z));
}

template <typename Out>
__device__ inline void write_zeros(const Heads& heads, int m, int head, Out* out) {
  Out* to = out + (static_cast<int64_t>(m) * heads.value_heads + head) * heads.value_dim;
  for (int i = threadIdx.x; i < heads.value_dim; i += blockDim.x) to[i] = from_float<Out>(0.0f);
}

template <typename Out>
__global__ void __launch_bounds__(kMostThreads) tree_kernel(const Pass op, Out* out) {
  SPECENGINE_SHARED(float4, vectors, 2 * kVectors / 4);
  SPECENGINE_SHARED(float, sums, 2 * kWarp);
  SPECENGINE_SHARED(unsigned, path, kMaskWords);
  SPECENGINE_SHARED(unsigned, written, kMaskWords);
  wait_for_previous_kernel();
  const int m = blockIdx.x, head = blockIdx.y;
  const int request = request_of_row(op.row_start, op.batch, m);
  if (request == op.batch) return write_zeros(op.heads, m, head, out);
  const int first_row = op.row_start[request], node = m - first_row;
  find_path(op, m, op.row_start[request + 1], path, written);
  if (path[0] == 0) return write_zeros(op.heads, m, head, out);
  if ((written[node / 32] >> node % 32 & 1) == 0) return;  // no leaf
  Column state;
  state.load(op.heads, op.state(request, head));
  const auto next = [&](int from) { return node_after(path, op.words, from); };
  const auto record = [&](int from) { return op.record(first_row + from); };
  walk(op.heads, head, 0, state, vectors, next, record, [&](int from, float output, int turn) {
    if ((written[from / 32] >> from % 32 & 1) == 0) return __syncthreads();
    write_output(op, first_row + from, head, output, sums + turn * kWarp, out);
  });
}

template <typename Out>
__global__ void __launch_bounds__(kMostThreads) chain_kernel(const Pass op, Out* out) {
  SPECENGINE_SHARED(float4, vectors, 2 * kVectors / 4);
  SPECENGINE_SHARED(float, sums, 2 * kWarp);
  wait_for_previous_kernel();
  const int request = blockIdx.x, head = blockIdx.y;
  const int first_row = op.row_start[request], count = op.row_start[request + 1] - first_row;
  if (count <= 0) return;
  const auto record = [&](int i) { return op.record(first_row + i); };
  if (head >= op.heads.value_heads) {
    const int channel = (head - op.heads.value_heads) * blockDim.x + threadIdx.x;
    return keep_inputs(op.last_inputs(request), op.heads.channels, channel, count, record);
  }
  Column state;
  state.load(op.heads, op.state(request, head));
  const auto next = [&](int i) { return i + 1 < count ? i + 1 : -1; };
  walk(op.heads, head, 0, state, vectors, next, record,
       [&](int i, float output, int turn) { write_output(op, first_row + i, head, output, sums + turn * kWarp, out); });
  if (op.final) state.store(op.heads, op.state(request, head));
}

Pass pass_of(const GatedDelta& op) {
  const GatedDeltaLayer& layer = *op.layer;
  const DeltaStates& all = op.states;
  const auto size = [](int64_t n) { return static_cast<int>(n); };
  const int64_t layer_state = layer.value_heads() * layer.key_dim() * layer.value_dim();
  const int64_t layer_inputs = (kConvWidth - 1) * layer.channels();
  Pass pass{};
  pass.heads = {size(layer.key_heads),   size(layer.value_heads()), size(layer.key_dim()),
                size(layer.value_dim()), size(layer.channels()),    layer.tiled};
  pass.rows = op.rows.as<float>(), pass.conv = layer.conv.as<float>(), pass.decay = layer.decay.as<float>();
  pass.dt_bias = layer.dt_bias.as<float>(), pass.norm = layer.norm.as<float>();
  pass.states = all.states.as<float>() + op.number * layer_state;
  pass.inputs = all.conv.as<float>() + op.number * layer_inputs;
  pass.records = all.record(op.number, 0);
  pass.slots = all.slots.as<int>(), pass.row_start = op.row_start.as<int>();
  pass.ancestors = op.ancestors.as<unsigned>();
  pass.slot_state = all.layers() * layer_state, pass.slot_inputs = all.layers() * layer_inputs;
  pass.row_columns = size(layer.row_columns()), pass.batch = size(op.row_start.shape[0] - 1);
  pass.words = op.ancestors.defined() ? size(op.ancestors.shape[1]) : 0;
  pass.final = all.final, pass.eps = op.eps;
  return pass;
}

}  // namespace
}  // namespace delta

void run_cuda(const GatedDelta& op) {
  if (op.rows.numel() == 0 || op.row_start.shape[0] < 2) return;
  const DeviceGuard guard(op.rows.device_id);
  const delta::Pass pass = delta::pass_of(op);
  const delta::Heads& heads = pass.heads;
  const unsigned rows = static_cast<unsigned>(op.rows.shape[0]), value_heads = heads.value_heads;
  const dim3 parts(rows, delta::blocks_of(2 * heads.key_heads + heads.value_heads + 1, delta::kWarps));
  launch({"gated_delta", parts, delta::kWarps * kWarp, 0, op.rows.stream}, delta::record_kernel, pass);
  const unsigned inputs = op.states.final ? delta::blocks_of(heads.channels, heads.threads()) : 0;
  const bool trees = op.ancestors.defined();
  const dim3 paths(trees ? rows : static_cast<unsigned>(pass.batch), value_heads + inputs);
  with_float_type(op.out.dtype, [&](auto zero) {
    using Out = decltype(zero);
    launch({"gated_delta", paths, static_cast<unsigned>(heads.threads()), 0, op.rows.stream},
           trees ? delta::tree_kernel<Out> : delta::chain_kernel<Out>, pass, op.out.as<Out>());
  });
}

}  // namespace specengine
