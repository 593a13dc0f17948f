// The gated delta rule along a path. A block owns one value head of one path. A warp owns eight columns of the head's
// state; a lane owns every fourth group of four rows of one column, in registers. A sum runs over a lane's rows in four
// chains, then over the four lanes of the column. Columns do not meet and a step reads one token's record, so the bits
// of a state depend on its path alone. Sums of products are fused by name: the pass and the replay round alike.
#pragma once
#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/gated_delta/gated_delta.h"

namespace specengine::delta {

constexpr int kColumns = 8;                // of a warp: a sector of 32 bytes in every row of a state
constexpr int kSlices = kWarp / kColumns;  // lanes of a column
constexpr int kFours = kMaxDeltaDim / 4 / kSlices;
constexpr int kMostThreads = kMaxDeltaDim / kColumns * kWarp;
constexpr int kVectors = 2 * kMaxDeltaDim;  // floats of q and k of a token

inline int blocks_of(int64_t size, int threads) { return static_cast<int>((size + threads - 1) / threads); }

// The sizes of a layer, and where a row's record has what one of its heads reads.
struct Heads {
  int key_heads, value_heads, key_dim, value_dim, channels;
  bool tiled;

  int threads() const { return blocks_of(value_dim, kColumns) * kWarp; }
  __device__ int64_t record_floats() const { return 2 * (static_cast<int64_t>(channels) + value_heads); }
  __device__ int key_channel(int head) const {
    return (tiled ? head % key_heads : head / (value_heads / key_heads)) * key_dim;
  }
  __device__ const float* query(const float* record, int head) const { return record + channels + key_channel(head); }
  __device__ const float* key(const float* record, int head) const { return query(record, head) + key_heads * key_dim; }
  __device__ const float* value(const float* record, int head) const {
    return record + channels + 2 * key_heads * key_dim + head * value_dim;
  }
  __device__ const float* gates(const float* record) const { return record + 2 * channels; }  // decays, then rates
};

// What a lane reads of a token: numbers of its head, its column's value, and the q and k that it puts in shared memory.
struct Token {
  static constexpr int kHeld = kVectors / kWarp;  // a block of one warp holds all
  float held[kHeld];
  float decay, rate, v;

  __device__ void fetch(const Heads& heads, const float* record, int head, int column) {
    const float *q = heads.query(record, head), *k = heads.key(record, head);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = threadIdx.x + j * blockDim.x, component = i % kMaxDeltaDim;
      if (i < kVectors) held[j] = component >= heads.key_dim ? 0.0f : i < kMaxDeltaDim ? k[component] : q[component];
    }
    decay = heads.gates(record)[head], rate = heads.gates(record)[heads.value_heads + head];
    v = column < heads.value_dim ? heads.value(record, head)[column] : 0.0f;
  }

  __device__ void put(float4* vectors) const {
    float* to = reinterpret_cast<float*>(vectors);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i < kVectors) to[i] = held[j];
    }
  }
};

// A lane's part of a state [key_dim, value_dim]; what lies outside is 0.
class Column {
 public:
  __device__ Column() : slice_(threadIdx.x % kWarp / kColumns) {}

  __device__ static int number() { return threadIdx.x / kWarp * kColumns + threadIdx.x % kColumns; }

  __device__ void load(const Heads& heads, const float* state) {
    visit(heads, [&](float& own, int64_t at) { own = state[at]; });
  }
  __device__ void store(const Heads& heads, float* state) {
    visit(heads, [&](float& own, int64_t at) { state[at] = own; });
  }

  // Makes the state that behind a token. Returns its output, in all lanes of the column. vectors: its k, then its q.
  __device__ float step(const Token& token, const float4* vectors) {
    const float4 *k = vectors + slice_, *q = k + kMaxDeltaDim / 4;
    float4 sum{};
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const float4 faded = {rows_[j].x * token.decay, rows_[j].y * token.decay, rows_[j].z * token.decay,
                            rows_[j].w * token.decay};
      rows_[j] = faded;
      sum = add(sum, k[j * kSlices], faded);
    }
    const float delta = (token.v - total(sum)) * token.rate;
    sum = {};
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      rows_[j] = add(rows_[j], k[j * kSlices], {delta, delta, delta, delta});
      sum = add(sum, q[j * kSlices], rows_[j]);
    }
    return total(sum);
  }

 private:
  __device__ static float4 add(const float4& to, const float4& a, const float4& b) {
    return {fmaf(a.x, b.x, to.x), fmaf(a.y, b.y, to.y), fmaf(a.z, b.z, to.z), fmaf(a.w, b.w, to.w)};
  }
  __device__ static float total(const float4& sum) {
    float x = (sum.x + sum.y) + (sum.z + sum.w);
#pragma unroll
    for (int offset = kColumns; offset < kWarp; offset *= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
  }

  template <typename Visit>
  __device__ void visit(const Heads& heads, const Visit& at) {
    const int column = number();
    const auto one = [&](float& own, int row) {
      own = row < heads.key_dim && column < heads.value_dim ? own : 0.0f;
      if (row < heads.key_dim && column < heads.value_dim)
        at(own, static_cast<int64_t>(row) * heads.value_dim + column);
    };
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int row = 4 * (j * kSlices + slice_);
      one(rows_[j].x, row), one(rows_[j].y, row + 1), one(rows_[j].z, row + 2), one(rows_[j].w, row + 3);
    }
  }

  float4 rows_[kFours] = {};
  int slice_;
};

// Steps from `first` to next(first) and so on, up to a negative number; record(step): of the step's token. A token is
// fetched while the one before is stepped. finish(step, output, turn) has a barrier; turn alternates between 0 and 1.
// vectors: shared, 2 * kVectors floats.
template <typename Next, typename Record, typename Finish>
__device__ inline void walk(const Heads& heads, int head, int first, Column& state, float4* vectors, const Next& next,
                            const Record& record, const Finish& finish) {
  const int column = Column::number();
  Token token;
  token.fetch(heads, record(first), head, column);
  token.put(vectors);
  __syncthreads();
  for (int step = first, turn = 0; step >= 0; turn ^= 1) {
    const int following = next(step);
    Token ahead = token;
    if (following >= 0) ahead.fetch(heads, record(following), head, column);
    const float output = state.step(token, vectors + turn * kVectors / 4);
    if (following >= 0) ahead.put(vectors + (turn ^ 1) * kVectors / 4);
    finish(step, output, turn);
    token = ahead, step = following;
  }
}

// Writes the last inputs of a channel's convolution behind `count` more tokens. inputs: [3, channels].  added(i): the
// row of the i-th of them.
template <typename Added>
__device__ inline void keep_inputs(float* inputs, int channels, int channel, int count, const Added& added) {
  constexpr int kKept = kConvWidth - 1;
  if (channel >= channels) return;
  float kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int from = i + count - kKept;
    const float* row = from < 0 ? inputs + static_cast<int64_t>(i + count) * channels : added(from);
    kept[i] = row[channel];
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) inputs[static_cast<int64_t>(i) * channels + channel] = kept[i];
}

}  // namespace specengine::delta
