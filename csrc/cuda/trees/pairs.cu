// PairRows: a block owns a request. KeepPairs, KeepLast: a block copies one row. Floors: the rows' columns; the kept
// states once.
#include "ops/growth/pairs.h"

#include "cuda/trees/chain_rows.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;
static_assert(kMaxNodes <= kThreads);

struct Waiting {
  const int *history, *history_length, *counts, *first;
  int64_t *last, *above;
  int *ends, *blocks;
  int capacity, unread, block, masks, mask_token;
};

__global__ void __launch_bounds__(kThreads) pair_rows_kernel(Waiting from, ChainRows rows) {
  wait_for_previous_kernel();
  const int b = blockIdx.x, i = threadIdx.x, count = from.counts[b], first = from.first[b];
  const int* tokens = from.history + static_cast<int64_t>(b) * from.capacity;
  const int states = rows.nodes - from.masks, last = min(max(count - 1, 0), states - 1);
  if (i < rows.nodes) {
    const int position = first + 1 + i;
    const bool read = i < count - from.unread && position < from.capacity;
    const bool masked = count > 0 && i >= count && i < count + from.masks;
    rows.write(b, i, read ? tokens[position] : masked ? from.mask_token : -1);
    if (from.above != nullptr)
      from.above[b * rows.nodes + i] = masked ? static_cast<int>(gridDim.x) * states : b * states + min(i, last);
  }
  if (i <= from.masks) from.last[b * (1 + from.masks) + i] = b * rows.nodes + last + i;
  if (i == 0) {
    const int root = tokens[from.history_length[b] - 1];
    from.ends[b] = first + count - 1, from.ends[gridDim.x + b] = first + count, from.ends[2 * gridDim.x + b] = root;
    if (from.blocks != nullptr) from.blocks[static_cast<int64_t>(b) * from.block] = root;
  }
}

template <typename Row, typename Kept>
struct Keep {
  const Row* rows;
  const int *row_start, *path, *path_length, *history_length;
  Kept* kept;
  int *counts, *first;
  int64_t columns;
  int nodes, room;
  bool add;
};

template <typename Row, typename Kept>
__global__ void __launch_bounds__(kThreads) keep_pairs_kernel(Keep<Row, Kept> op) {
  wait_for_previous_kernel();
  const int b = blockIdx.x, i = blockIdx.y, length = op.path_length[b];
  const int before = op.add ? op.counts[b] : 0;
  const int count = min(length, min(op.nodes, op.room - before));
  if (i < count) {
    const int64_t row = op.row_start[b] + max(op.path[static_cast<int64_t>(b) * op.nodes + i], 0);
    const Row* from = op.rows + row * op.columns;
    Kept* to = op.kept + (static_cast<int64_t>(b) * op.room + before + i) * op.columns;
    for (int64_t c = threadIdx.x; c < op.columns; c += kThreads) to[c] = from_float<Kept>(to_float(from[c]));
  }
  if (i > 0) return;
  __syncthreads();  // all threads have read the count
  if (threadIdx.x > 0) return;
  op.counts[b] = before + max(count, 0);
  if (!op.add) op.first[b] = op.history_length[b] - 1 - length;
}

template <typename Row>
__global__ void __launch_bounds__(kThreads)
    keep_last_kernel(const Row* rows, const int* row_start, const int* path, const int* path_length, float* kept,
                     int* known, int nodes, int64_t columns) {
  wait_for_previous_kernel();
  const int64_t b = blockIdx.x;
  const int length = min(path_length[b], nodes);
  if (threadIdx.x == 0) known[b] = length > 0;
  if (length <= 0) return;
  const Row* from = rows + (row_start[b] + max(path[b * nodes + length - 1], 0)) * columns;
  for (int64_t c = threadIdx.x; c < columns; c += kThreads) kept[b * columns + c] = to_float(from[c]);
}

}  // namespace

void run_cuda(const PairRows& op) {
  const DeviceGuard guard(op.history.device_id);
  const int64_t B = op.history.shape[0];
  const Waiting from{op.history.as<int>(),
                     op.history_length.as<int>(),
                     op.counts.as<int>(),
                     op.first.as<int>(),
                     op.last.as<int64_t>(),
                     op.above.as<int64_t>(),
                     op.ends.as<int>(),
                     op.blocks.as<int>(),
                     static_cast<int>(op.history.shape[1]),
                     static_cast<int>(op.unread),
                     op.blocks.given() ? static_cast<int>(op.blocks.shape[1]) : 0,
                     static_cast<int>(op.masks),
                     static_cast<int>(op.mask_token)};
  const ChainRows rows{op.rows.tokens.as<int>(),
                       op.rows.parents.as<int>(),
                       op.rows.depths.as<int>(),
                       op.rows.ancestors.as<int>(),
                       static_cast<int>(op.rows.tokens.shape[0] / B),
                       static_cast<int>(op.rows.ancestors.shape[1])};
  launch({"pair_rows", dim3(static_cast<unsigned>(B)), dim3(kThreads), 0, op.history.stream}, pair_rows_kernel, from,
         rows);
}

void run_cuda(const KeepPairs& op) {
  const DeviceGuard guard(op.rows.device_id);
  const int64_t B = op.path.shape[0], N = op.path.shape[1], room = op.kept.shape[1];
  if (B == 0 || N == 0 || room == 0) return;
  const unsigned pairs = static_cast<unsigned>(op.add ? 1 : N < room ? N : room);
  const auto start = [&]<typename Row, typename Kept>(Row, Kept) {
    const Keep<Row, Kept> keep{op.rows.as<Row>(),        op.row_start.as<int>(),      op.path.as<int>(),
                               op.path_length.as<int>(), op.history_length.as<int>(), op.kept.as<Kept>(),
                               op.counts.as<int>(),      op.first.as<int>(),          op.rows.shape[1],
                               static_cast<int>(N),      static_cast<int>(room),      op.add};
    launch({"keep_pairs", dim3(static_cast<unsigned>(B), pairs), dim3(kThreads), 0, op.rows.stream},
           keep_pairs_kernel<Row, Kept>, keep);
  };
  with_float_type(op.rows.dtype, [&](auto from) { with_float_type(op.kept.dtype, [&](auto to) { start(from, to); }); });
}

void run_cuda(const KeepLast& op) {
  const int64_t B = op.path.shape[0], N = op.path.shape[1];
  if (B == 0 || N == 0) return;
  const DeviceGuard guard(op.rows.device_id);
  with_float_type(op.rows.dtype, [&](auto zero) {
    using Row = decltype(zero);
    launch({"keep_last", dim3(static_cast<unsigned>(B)), dim3(kThreads), 0, op.rows.stream}, keep_last_kernel<Row>,
           op.rows.as<Row>(), op.row_start.as<int>(), op.path.as<int>(), op.path_length.as<int>(), op.kept.as<float>(),
           op.known.as<int>(), static_cast<int>(N), op.rows.shape[1]);
  });
}

}  // namespace specengine
