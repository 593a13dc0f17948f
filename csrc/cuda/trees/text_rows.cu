// A block owns a request. Floor: the columns, and a row of the block table for each row.
#include "ops/growth/text_rows.h"

#include "cuda/trees/chain_rows.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 128;

struct Text {
  const int *history, *history_length, *active, *block_table;
  int* first;
  int *seen_lengths, *seen_table, *seen_bits;
  int64_t* last;
  int* counts;
  int capacity, pages, unread, block, requests, masks, mask_token;
};

__global__ void __launch_bounds__(kThreads) text_rows_kernel(Text op, ChainRows rows) {
  wait_for_previous_kernel();
  const int b = blockIdx.x, length = op.history_length[b], first = op.first[b];
  const int* tokens = op.history + static_cast<int64_t>(b) * op.capacity;
  const bool runs = op.active[b] != 0 && length > 1;
  const int verified = length - 1, count = runs ? min(length - op.unread - first, rows.nodes) : 0;
  for (int i = threadIdx.x; i < rows.nodes; i += kThreads) {
    const int position = first + i;
    const bool read = i < count && position < op.capacity;
    const bool masked = runs && i >= count && i < count + op.masks;
    rows.write(b, i, read ? tokens[position] : masked ? op.mask_token : -1);
    const int in_text = position < op.block ? position + 1 : position / op.block * op.block;
    const int keys = position < verified ? in_text : verified;
    const int64_t row = static_cast<int64_t>(b) * rows.nodes + i;
    op.seen_lengths[row] = read ? max(keys - 1, 0) : 0, op.seen_bits[row] = read;
  }
  const int* table = op.block_table + static_cast<int64_t>(b) * op.pages;
  for (int i = threadIdx.x; i < rows.nodes * op.pages; i += kThreads) {
    op.seen_table[static_cast<int64_t>(b) * rows.nodes * op.pages + i] = table[i % op.pages];
  }
  const int64_t last = static_cast<int64_t>(b) * rows.nodes + max(count - 1, 0),
                end = static_cast<int64_t>(b + 1) * rows.nodes;
  for (int i = threadIdx.x; i <= op.masks; i += kThreads) op.last[b * (1 + op.masks) + i] = min(last + i, end - 1);
  __syncthreads();  // all threads have read `first`
  if (threadIdx.x > 0) return;
  op.counts[b] = runs, op.counts[op.requests + b] = first, op.counts[2 * op.requests + b] = length - 1;
  op.counts[3 * op.requests + b] = max(length - 2, 0), op.counts[4 * op.requests + b] = tokens[max(length - 1, 0)];
  if (runs) op.first[b] = length - 1;
}

}  // namespace

void run_cuda(const TextRows& op) {
  const DeviceGuard guard(op.history.device_id);
  const int64_t B = op.history.shape[0];
  const Text text{op.history.as<int>(),
                  op.history_length.as<int>(),
                  op.active.as<int>(),
                  op.block_table.as<int>(),
                  op.first.as<int>(),
                  op.seen.lengths.as<int>(),
                  op.seen.block_table.as<int>(),
                  op.seen.ancestors.as<int>(),
                  op.last.as<int64_t>(),
                  op.counts.as<int>(),
                  static_cast<int>(op.history.shape[1]),
                  static_cast<int>(op.block_table.shape[1]),
                  static_cast<int>(op.unread),
                  static_cast<int>(op.seen.block),
                  static_cast<int>(B),
                  static_cast<int>(op.masks),
                  static_cast<int>(op.mask_token)};
  const ChainRows rows{op.rows.tokens.as<int>(),
                       op.rows.parents.as<int>(),
                       op.rows.depths.as<int>(),
                       op.rows.ancestors.as<int>(),
                       static_cast<int>(op.rows.tokens.shape[0] / B),
                       static_cast<int>(op.rows.ancestors.shape[1])};
  launch({"text_rows", dim3(static_cast<unsigned>(B)), dim3(kThreads), 0, op.history.stream}, text_rows_kernel, text,
         rows);
}

}  // namespace specengine
