// A block owns a request. Its threads hold the keys of the candidates and find, bit by bit, the highest threshold that
// enough keys reach. Then each thread numbers and writes one node. Floor: the candidates once.
#include "ops/growth/select_limited.h"

#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kOwn = kMaxCandidates / kThreads;  // candidates of a thread: i, i + kThreads, ...
constexpr int kWords = kMaxCandidates / 32;
static_assert(kMaxNodes <= kThreads && kWords <= kThreads);

// The deepest depth of each request's nodes; below 0: it is idle.
struct Depths {
  const int* limits;  // nullptr: those of SelectLimited
  const int *known, *history_length, *final_length, *active;
  int levels;

  __device__ int of(int b) const {
    if (limits != nullptr) return limits[b];
    if (active[b] == 0) return -1;
    return known[b] > 0 ? min(levels, max(final_length[b] - history_length[b] - 1, 0)) : 0;
  }
};

struct Select {
  const int *tokens, *parents, *depths;
  const float* scores;
  Depths deepest;
  int *out_tokens, *out_parents, *out_depths, *kept;
  unsigned* ancestors;
  int* node_counts;
  int candidates, nodes, words;
};

__device__ inline bool bit_of(const unsigned* words, int i) { return words[i / 32] >> i % 32 & 1u; }
__device__ inline int bits_below(unsigned word, int i) { return __popc(word & ((1u << i % 32) - 1)); }

// Adds up over the block with one barrier: sums [2, kWarps] are shared, and calls take its halves in turn.
struct Counter {
  int* sums;
  int turn = 0;

  __device__ int total(int own) {
    int* of_warps = sums + turn * kWarps;
    turn = 1 - turn;
    own = __reduce_add_sync(kAllLanes, own);
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = own;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp];
    return total;
  }
};

// The least key to keep, so that `wanted` candidates are kept, or all if there are fewer. A key of 0 is no candidate.
__device__ uint64_t least_kept(const uint64_t (&keys)[kOwn], int wanted, Counter counter) {
  const auto reached_by = [&](uint64_t threshold) {
    int own = 0;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) own += keys[j] >= threshold;
    return counter.total(own);
  };
  uint64_t threshold = 0;
  int kept = reached_by(1);
  for (int bit = kSelectionBits - 1; bit >= 0 && kept > wanted; --bit) {
    const uint64_t higher = threshold | uint64_t{1} << bit;
    const int reached = reached_by(higher);
    if (reached >= wanted) threshold = higher, kept = reached;
  }
  return threshold > 0 ? threshold : 1;
}

__device__ void write_padding(const Select& op, int b, int node) {
  const int64_t place = static_cast<int64_t>(b) * op.nodes + node;
  op.out_tokens[place] = op.out_parents[place] = op.out_depths[place] = op.kept[place] = -1;
  for (int w = 0; w < op.words; ++w) op.ancestors[place * op.words + w] = 0;
}

__global__ void __launch_bounds__(kThreads) select_nodes_kernel(Select op) {
  SPECENGINE_SHARED(int, sums, 2 * kWarps);
  SPECENGINE_SHARED(unsigned, chosen, kWords);     // bit i: candidate i
  SPECENGINE_SHARED(int, before, kWords);          // chosen candidates in the words before
  SPECENGINE_SHARED(int, candidate_of, kThreads);  // of the chosen ones, in order
  SPECENGINE_SHARED(int, above, kThreads);         // the parent's place among them; -1: none
  SPECENGINE_SHARED(unsigned, rooted, kWarps);     // bit t: a path leads from the root to chosen candidate t
  SPECENGINE_SHARED(int, node_of, kThreads);
  wait_for_previous_kernel();
  const int b = blockIdx.x, t = threadIdx.x, warp = t / kWarp, lane = t % kWarp, limit = op.deepest.of(b);
  const int64_t first = static_cast<int64_t>(b) * op.candidates;
  const int *parents = op.parents + first, *depths = op.depths + first;

  const bool idle = limit < 0 || depths[0] != 0;
  uint64_t keys[kOwn];
  bool any_nan = false;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int i = j * kThreads + t, depth = !idle && i < op.candidates ? depths[i] : -1;
    const float score = depth >= 0 ? op.scores[first + i] : 0;
    any_nan |= score != score;
    keys[j] = i > 0 && depth >= 0 && depth <= limit ? selection_key(score, i) : 0;
  }
  any_nan = __syncthreads_or(any_nan);
  if (idle || any_nan) {
    if (t == 0) op.node_counts[b] = idle ? 0 : -1;
    if (t < op.nodes) write_padding(op, b, t);
    return;
  }

  const uint64_t least = least_kept(keys, op.nodes - 1, Counter{sums});
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const unsigned word = __ballot_sync(kAllLanes, keys[j] >= least || (j == 0 && t == 0));
    if (lane == 0) chosen[j * kWarps + warp] = word;
  }
  __syncthreads();
  if (t < kWords) {
    int count = 0;
    for (int word = 0; word < t; ++word) count += __popc(chosen[word]);
    before[t] = count;
  }
  __syncthreads();
  const auto place_of = [&](int i) { return before[i / 32] + bits_below(chosen[i / 32], i); };
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int i = j * kThreads + t;
    if (bit_of(chosen, i)) candidate_of[place_of(i)] = i;
  }
  __syncthreads();
  bool keep = t < before[kWords - 1] + __popc(chosen[kWords - 1]);
  const int i = keep ? candidate_of[t] : 0, parent = keep && t > 0 ? parents[i] : -1;
  above[t] = parent >= 0 && parent < i && bit_of(chosen, parent) ? place_of(parent) : -1;
  keep = keep && (t == 0 || above[t] >= 0);

  // A candidate whose parent is dropped is dropped too. In a valid tree none is.
  for (bool orphan = true; __syncthreads_or(orphan);) {
    const unsigned word = __ballot_sync(kAllLanes, keep);
    if (lane == 0) rooted[warp] = word;
    __syncthreads();
    orphan = keep && t > 0 && !bit_of(rooted, above[t]);
    keep = keep && !orphan;
  }
  int node = bits_below(rooted[warp], t), count = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    node += w < warp ? __popc(rooted[w]) : 0;
    count += __popc(rooted[w]);
  }
  node_of[t] = node;
  __syncthreads();

  if (t == 0) op.node_counts[b] = count;
  if (t >= count && t < op.nodes) write_padding(op, b, t);
  if (!keep) return;
  const int64_t place = static_cast<int64_t>(b) * op.nodes + node;
  op.out_tokens[place] = op.tokens[first + i], op.out_parents[place] = t == 0 ? -1 : node_of[above[t]];
  op.out_depths[place] = depths[i], op.kept[place] = i;
  int on_path = t;  // nodes descend on the way up, and so do their words
  for (int w = op.words - 1; w >= 0; --w) {
    unsigned bits = 0;
    for (; on_path >= 0 && node_of[on_path] / 32 == w; on_path = above[on_path]) bits |= 1u << node_of[on_path] % 32;
    op.ancestors[place * op.words + w] = bits;
  }
}

void launch_select(const SelectNodes& op, const Depths& deepest) {
  const int64_t B = op.limits.shape[0];
  if (B == 0) return;
  const DeviceGuard guard(op.limits.device_id);
  const Select select{op.tokens.as<int>(),
                      op.parents.as<int>(),
                      op.depths.as<int>(),
                      op.scores.as<float>(),
                      deepest,
                      op.out_tokens.as<int>(),
                      op.out_parents.as<int>(),
                      op.out_depths.as<int>(),
                      op.kept.as<int>(),
                      op.ancestors.as<unsigned>(),
                      op.node_counts.as<int>(),
                      static_cast<int>(op.tokens.shape[1]),
                      static_cast<int>(op.out_tokens.shape[1]),
                      static_cast<int>(op.ancestors.shape[2])};
  launch({"select_nodes", dim3(static_cast<unsigned>(B)), dim3(kThreads), 0, op.limits.stream}, select_nodes_kernel,
         select);
}

}  // namespace

void run_cuda(const SelectNodes& op) {
  launch_select(op, {op.limits.as<int>(), nullptr, nullptr, nullptr, nullptr, 0});
}

void run_cuda(const SelectLimited& op) {
  launch_select(op.with_limits(op.known),
                {nullptr, op.known.as<int>(), op.history_length.as<int>(), op.final_length.as<int>(),
                 op.active.as<int>(), static_cast<int>(op.levels)});
}

}  // namespace specengine
