// A block owns one request. It searches the text as draft_lookup does, follows the chain along the candidates as far as
// they agree, one reduction a token, and copies the columns. Floor: the history and the candidates once.
#include "ops/growth/add_copies.h"

#include "cuda/base/arch.cuh"
#include "cuda/trees/longest_match.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

struct Columns {
  int *tokens, *parents, *depths;
  float* scores;
  int count;

  __device__ void write(int64_t at, int token, int parent, int depth, float score) const {
    tokens[at] = token, parents[at] = parent, depths[at] = depth, scores[at] = score;
  }
};

Columns columns_of(const CandidateColumns& columns) {
  return {columns.tokens.as<int>(), columns.parents.as<int>(), columns.depths.as<int>(), columns.scores.as<float>(),
          static_cast<int>(columns.tokens.shape[1])};
}

// The class of a match of `length` tokens.
__device__ inline int class_of(int length) {
  return min(31 - __clz(length), static_cast<int>(AddCopies::kClasses) - 1);
}

__global__ void __launch_bounds__(kThreads)
    add_copies_kernel(const int* history, const int* history_length, const int* active, const int* known,
                      const float* chances, Columns from, Columns to, int* joined_known, int capacity, int min_ngram,
                      int max_ngram) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(unsigned long long, scratch, kWarp);
  SPECENGINE_SHARED(int, found, kWarp);
  SPECENGINE_SHARED(int, path, AddCopies::kLongestChain);  // candidates that begin the chain
  const int b = blockIdx.x, length = history_length[b];
  const int* tokens = history + static_cast<int64_t>(b) * capacity;
  const int64_t first = static_cast<int64_t>(b) * from.count, first_out = static_cast<int64_t>(b) * to.count;
  const int chain = to.count - from.count;
  const bool drafted = known[b];
  LongestMatch match{};
  if (active[b]) match = longest_match(tokens, length, min_ngram, max_ngram, scratch);
  int agreed = 0, last = 0;  // nodes of the chain that are candidates, and the last one of them
  while (drafted && match.length > 0 && agreed < chain) {
    const int token = match.following(tokens, length, agreed);
    int child = from.count;
    for (int i = 1 + threadIdx.x; i < from.count; i += kThreads) {
      const int64_t at = first + i;
      if (from.depths[at] >= 0 && from.parents[at] == last && from.tokens[at] == token) child = min(child, i);
    }
    child = block_reduce<Min>(child, found);
    if (child == from.count) break;
    if (threadIdx.x == 0) path[agreed] = child;
    last = child, ++agreed;
  }
  __syncthreads();
  const auto score_of = [&](int node) {
    float score = 0;
    for (int i = 0; i <= node; ++i) score += chances[class_of(match.length + i)];
    return score;
  };
  for (int i = threadIdx.x; i < to.count; i += kThreads) {
    const int64_t at = first + i, out = first_out + i;
    const int node = i - from.count;
    if (node < 0) {
      float score = from.scores[at];
      for (int k = 0; k < agreed; ++k) {
        if (path[k] == i) score = fmaxf(score, score_of(k));
      }
      to.write(out, from.tokens[at], from.parents[at], i > 0 && !drafted ? -1 : from.depths[at], score);
    } else if (match.length > 0 && node >= agreed) {
      to.write(out, match.following(tokens, length, node), node == agreed ? last : i - 1, node + 1, score_of(node));
    } else {
      to.write(out, -1, -1, -1, 0.0f);
    }
  }
  if (threadIdx.x == 0) joined_known[b] = drafted || match.length > 0;
}

}  // namespace

void run_cuda(const AddCopies& op) {
  const DeviceGuard guard(op.history.device_id);
  launch({"add_copies", dim3(static_cast<unsigned>(op.history.shape[0])), dim3(kThreads), 0, op.history.stream},
         add_copies_kernel, op.history.as<int>(), op.history_length.as<int>(), op.active.as<int>(), op.known.as<int>(),
         op.chances.as<float>(), columns_of(op.candidates), columns_of(op.joined), op.joined_known.as<int>(),
         static_cast<int>(op.history.shape[1]), static_cast<int>(op.min_ngram), static_cast<int>(op.max_ngram));
}

}  // namespace specengine
