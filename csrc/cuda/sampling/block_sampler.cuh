// The Sampler of rules/rows.h with a block of threads, in whole warps: all threads run the rule and get the same
// answers. Nothing is copied: every pass over a row makes the scores anew.
#pragma once
#include "cuda/sampling/filters.cuh"
#include "cuda/sampling/requests.cuh"
#include "rules/rows.h"

#if defined(__CUDACC__)
#pragma nv_diag_suppress 20014  // rules are for host and device, this sampler only for the device
#endif

namespace specengine {

// A kernel has __launch_bounds__(kRuleThreads, 1): without the 1 ptxas gives the functions it calls 64 registers only.
constexpr int kRuleThreads = 512;
// Small vocabularies keep few threads busy.
inline int rule_threads(int64_t vocab) { return vocab <= 128 ? kWarp : vocab <= 1024 ? 2 * kWarp : kRuleThreads; }

// A sampler's state, in shared memory: in registers every thread would have to hold it through the whole walk.
struct SamplerState {
  // The request.
  DraftedTree tree;
  float temperature, top_p, min_p;
  int top_k;
  bool filters, aligned;
  uint32_t root_position;
  // The row loaded last.
  Row row;
  int top_token;
  float top;  // the largest score
  uint64_t untempered_total;
  Leaders leaders;

  __device__ bool greedy() const { return temperature == 0.0f; }
};
__device__ inline SamplerState& sampler_state() {
  SPECENGINE_SHARED(SamplerState, state, 1);
  return state[0];
}

// The functions from here to BlockSampler have many callers and are not inlined: else nvcc takes minutes and runs out
// of registers. Thread 0 writes the state; the others read it after the next barrier.

// Every thread gets the sum. Also a barrier.
__device__ __noinline__ inline uint64_t block_total(uint64_t mine) {
  SPECENGINE_SHARED(uint64_t, totals, kWarp);
  return block_reduce<Sum>(mine, totals);
}
__device__ __noinline__ inline Candidate best_of_block(Candidate mine) {
  SPECENGINE_SHARED(Candidate, best, kWarp);
  return block_best(mine, best);
}

__device__ inline uint64_t weigh_scores(const Row& row, float top, uint64_t* weights) {
  __syncthreads();  // no thread reads the old weights any more
  uint64_t total = 0;
  row.for_each(0, row.vocab, [&](float score, int v) {
    if (v < row.vocab) total += weights[v] = weight_of(score, top);
  });
  return block_total(total);
}

__device__ inline Leaders leaders_of(const Row& row, Candidate first) {
  float most = -INFINITY;
  int token = kNoToken;
  row.for_each(0, row.vocab, [&](float score, int v) {
    if (v != first.token && score > most) most = score, token = v;
  });
  const Candidate second = best_of_block({most, token});
  return {{static_cast<int>(first.token), static_cast<float>(first.value)},
          {second.token == kNoToken ? 0 : static_cast<int>(second.token), static_cast<float>(second.value)}};
}

// Loads a node's row into the state; false if it is no distribution.
__device__ __noinline__ inline bool load_row(const float* logits, const int* index, int node, const uint32_t* mask,
                                             Needs needs, uint64_t* untempered) {
  SPECENGINE_SHARED(int, path, kMaxNodes);
  SPECENGINE_SHARED(unsigned, path_bits, kPathBits / 32);
  SPECENGINE_SHARED(unsigned, low, kBins);
  SPECENGINE_SHARED(unsigned, high, kBins);
  SPECENGINE_SHARED(uint64_t, sums, kWarp);
  SPECENGINE_SHARED(uint64_t, found, 3);
  SamplerState& state = sampler_state();
  __syncthreads();  // no thread reads the last row any more
  for (int i = threadIdx.x; i < kPathBits / 32; i += blockDim.x) path_bits[i] = 0;
  if (threadIdx.x == 0) {
    Row& row = state.row;
    row.logits = logits, row.index = index, row.aligned = state.aligned && index == nullptr, row.mask = mask;
    row.path = path, row.path_bits = path_bits, row.depth = state.tree.depth(node);
    row.position = state.root_position + 1 + static_cast<uint32_t>(row.depth);
  }
  __syncthreads();
  Row row = state.row;
  if (row.counts != nullptr) {
    if (threadIdx.x == 0) {
      for (int i = 0; node > 0; node = state.tree.parent(node), ++i) {
        const int token = state.tree.token(node);
        path[i] = token;
        path_bits[token % kPathBits / 32] |= 1u << (token % 32);
      }
    }
    __syncthreads();
  }

  row.keep_all(), row.temperature = 0;  // as scores are before temperature and filters
  const Candidate first = best_of_block(most_likely(row, 0, row.vocab));
  if (first.token == kNoToken) return false;
  float top = static_cast<float>(first.value);
  if (needs.leaders) {
    const Leaders leaders = leaders_of(row, first);
    if (threadIdx.x == 0) state.leaders = leaders;
  }
  if (needs.untempered) {
    const uint64_t total = weigh_scores(row, top, untempered);
    if (threadIdx.x == 0) state.untempered_total = total;
  }
  if (threadIdx.x == 0) state.top_token = static_cast<int>(first.token);

  row.temperature = state.temperature;
  if (!state.greedy()) {
    top /= row.temperature;
    if (!(top > -INFINITY && top < INFINITY)) return false;
    row.top = top;
    if (state.filters) shrink(row, state.top_k, state.top_p, state.min_p, {low, high, sums, found});
  }
  if (threadIdx.x == 0) {
    state.top = top;
    Row& kept = state.row;
    kept.temperature = row.temperature, kept.filtered = row.filtered, kept.threshold = row.threshold;
    kept.last = row.last, kept.top = row.top, kept.min_p = row.min_p;
  }
  __syncthreads();
  return true;
}

__device__ __noinline__ inline uint64_t weigh_row(uint64_t* weights) {
  const SamplerState& state = sampler_state();
  const Row row = state.row;
  if (!state.greedy()) return weigh_scores(row, state.top, weights);
  __syncthreads();
  for (int v = threadIdx.x; v < row.vocab; v += blockDim.x) weights[v] = v == state.top_token ? fixed_point(1.0f) : 0;
  __syncthreads();
  return fixed_point(1.0f);
}

__device__ __noinline__ inline int draw_from_row() {
  SPECENGINE_SHARED(Candidate, best, kWarp);
  const Row& row = sampler_state().row;
  return static_cast<int>(draw(row, 0, row.vocab, best).token);
}

__device__ __noinline__ inline float score_in_row(int token) { return sampler_state().row.score(token); }

class BlockSampler {
 public:
  // aligned: whether rows of logits with a column per token, and the workspaces, start at multiples of 16 bytes.
  __device__ BlockSampler(const RequestTable& table, int b, const DraftedTree& tree, const DenseShaping& dense,
                          bool aligned) {
    if (threadIdx.x == 0) {
      SamplerState& state = sampler_state();
      state.tree = tree;
      state.temperature = table.temperature[b], state.filters = table.filters(b), state.aligned = aligned;
      state.top_k = table.top_k[b], state.top_p = table.top_p[b], state.min_p = table.min_p[b];
      state.root_position = static_cast<uint32_t>(table.history_length[b] - 1);
      state.row = table.row(b, dense), state.untempered_total = 1;
    }
    __syncthreads();
  }

  __device__ bool load(const float* logits, const int* index, const DraftedTree&, int node, const uint32_t* mask,
                       const Needs& needs, uint64_t* untempered) {
    return load_row(logits, index, node, mask, needs, untempered);
  }
  __device__ uint64_t weigh(uint64_t* weights) const { return weigh_row(weights); }
  __device__ int draw() const { return state().greedy() ? top_token() : draw_from_row(); }
  __device__ int draw_by_weight(const uint64_t* weights) const { return draw_from_weights(*this, weights); }
  __device__ double uniform(int node) const {
    return specengine::uniform(seed(), root_position(), static_cast<uint32_t>(node), NoiseStream::kAccept);
  }

  __device__ float temperature() const { return state().temperature; }
  __device__ Leaders leaders() const { return state().leaders; }
  __device__ int top_token() const { return state().top_token; }
  __device__ uint64_t untempered_total() const { return state().untempered_total; }
  __device__ bool allows(int token) const { return state().greedy() || score_in_row(token) > -INFINITY; }
  __device__ uint64_t weight(int token) const {
    if (state().greedy()) return token == top_token() ? fixed_point(1.0f) : 0;
    return weight_of(score_in_row(token), state().top);
  }

  __device__ double entropy() const {
    if (state().greedy()) return 0;
    const Row row = state().row;
    const float top = state().top;
    uint64_t total = 0, moment = 0;
    row.for_each(0, row.vocab, [&](float score, int) {
      const float weight = exp_polynomial<OneLane>(score - top);
      total += fixed_point(weight);
      if (weight > 0) moment += fixed_point(weight * (top - score));
    });
    const double all = static_cast<double>(block_total(total));
    return std::log(all * 0x1p-40) + static_cast<double>(block_total(moment)) / all;
  }

  // f may write its token's entry: barriers separate it from reads before and after.
  template <typename F>
  __device__ uint64_t sum(const F& f) const {
    __syncthreads();
    uint64_t total = 0;
    for (int v = threadIdx.x; v < vocab(); v += blockDim.x) total += f(v);
    return block_total(total);
  }
  template <typename F>
  __device__ int64_t best(int64_t begin, int64_t end, const F& f) const {
    Candidate found = nothing();
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      const double value = f(i);
      if (value > found.value) found = {value, i};
    }
    return best_of_block(found).token;
  }
  template <typename F>
  __device__ void once(const F& f) const {
    __syncthreads();
    if (threadIdx.x == 0) f();
    __syncthreads();
  }

  __device__ int vocab() const { return state().row.vocab; }
  __device__ uint32_t root_position() const { return state().root_position; }
  __device__ uint64_t seed() const { return state().row.seed; }

 private:
  __device__ static const SamplerState& state() { return sampler_state(); }

  __device__ __noinline__ static int draw_from_weights(BlockSampler sampler, const uint64_t* weights) {
    const Row& row = state().row;
    return specengine::draw_by_weight(sampler, weights, row.vocab, row.seed, row.position, NoiseStream::kBlock,
                                      NoiseStream::kToken);
  }
};

}  // namespace specengine
