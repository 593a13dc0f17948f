// A batch's trees for kernels whose blocks own a node's row of logits, or a part of it: blockIdx.x is the row.
#pragma once
#include "cuda/sampling/requests.cuh"

namespace specengine {

struct TreeRows {
  const int *tokens, *parents, *row_start;
  RequestTable table;
  TokenMasks masks;
  float* biases;
  int* counts;
  int requests, columns;
  bool aligned;  // rows of logits, biases and counts start at multiples of 16 bytes

  __device__ int nodes(int b) const { return min(row_start[b + 1] - row_start[b], columns); }
  __device__ bool idle(int b) const { return nodes(b) < 1 || tokens[row_start[b]] == kNoToken; }
  __device__ DenseShaping dense(int b) const {
    const int64_t row = static_cast<int64_t>(b) * table.vocab;
    return {biases + row, counts + row};
  }
  // Blocks (b, 0) to (b, gridDim.y - 1) own a request.
  __device__ int first_of_request() const { return blockIdx.y * blockDim.x + threadIdx.x; }
  __device__ int step_of_request() const { return gridDim.y * blockDim.x; }

  __device__ void mark() const {
    const int b = blockIdx.x;
    if (!idle(b)) table.mark(b, dense(b), first_of_request(), step_of_request());
  }
};

// The request of the block's row; -1 where the row is padding.
__device__ inline int request_of_row(const TreeRows& op) {
  const int index = blockIdx.x, thread = threadIdx.x;
  if (op.tokens[index] == kNoToken) return -1;
  int b = 0;  // requests that end before this row
  for (int i = thread; i - thread < op.requests; i += blockDim.x) {
    b += __syncthreads_count(i < op.requests && op.row_start[i + 1] <= index);
  }
  return b < op.requests && index - op.row_start[b] < op.nodes(b) ? b : -1;
}

// The block's row, of request b, without logits. The block has at least kMaxNodes threads.
__device__ inline Row row_of(const TreeRows& op, int b) {
  SPECENGINE_SHARED(int, parents, kMaxNodes);
  SPECENGINE_SHARED(int, path, kMaxNodes);
  SPECENGINE_SHARED(unsigned, path_bits, kPathBits / 32);
  SPECENGINE_SHARED(int, depth, 1);
  const int index = blockIdx.x, thread = threadIdx.x, first = op.row_start[b], node = index - first;
  Row row = op.table.row(b, op.dense(b));
  if (thread <= node) parents[thread] = op.parents[first + thread];
  if (thread < kPathBits / 32) path_bits[thread] = 0;
  __syncthreads();
  if (thread == 0) {
    int above = 0;
    for (int n = node; n > 0; n = parents[n], ++above) {
      if (row.counts == nullptr) continue;
      const int token = op.tokens[first + n];
      path[above] = token;
      path_bits[token % kPathBits / 32] |= 1u << (token % 32);
    }
    depth[0] = above;
  }
  __syncthreads();

  row.path = path, row.path_bits = path_bits, row.depth = depth[0], row.aligned = op.aligned;
  row.position = static_cast<uint32_t>(op.table.history_length[b] + row.depth);
  return row;
}

// The tokens of a part of a row, whole strips: parts are blocks in y.
struct Part {
  int begin, end;
};
__device__ inline Part part_of(const Row& row) {
  const int strips = (row.vocab + kStrip - 1) / kStrip, share = (strips + gridDim.y - 1) / gridDim.y * kStrip;
  const int begin = min(static_cast<int>(blockIdx.y) * share, row.vocab);
  return {begin, min(begin + share, row.vocab)};
}

}  // namespace specengine
