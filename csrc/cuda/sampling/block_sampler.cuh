// The Sampler of rules/rows.h with a block of threads, in whole warps: all threads run the rule and get the same
// answers. Nothing is copied: every pass over a row makes the scores anew. Where other blocks have noted what does not
// depend on the walk (note_rows.cu), a row is loaded without a pass, and its weights are written only when a rule
// changes them.
#pragma once
#include "cuda/sampling/filters.cuh"
#include "cuda/sampling/requests.cuh"
#include "cuda/sampling/row_notes.cuh"
#include "rules/rows.h"

#if defined(__CUDACC__)
#pragma nv_diag_suppress 20014  // rules are for host and device, this sampler only for the device
#endif

namespace specengine {

// A kernel has __launch_bounds__(kRuleThreads, 1): without the 1 ptxas gives the functions it calls 64 registers only.
constexpr int kRuleThreads = 512;
// Small vocabularies keep few threads busy.
inline int rule_threads(int64_t vocab) { return vocab <= 128 ? kWarp : vocab <= 1024 ? 2 * kWarp : kRuleThreads; }

struct LoadedRow {
  Row row;
  int top_token;
  float best, top;  // the largest score before temperature, and after it
  uint64_t untempered_total;
  Leaders leaders;
  // Of notes only.
  uint64_t total, moment;
  int drawn;
};

// A sampler's state, in shared memory: in registers every thread would have to hold it through the whole walk.
struct SamplerState {
  // The request.
  DraftedTree tree;
  float temperature, top_p, min_p;
  int top_k;
  bool filters, aligned;
  uint32_t root_position;
  Row shape;  // of every row, without logits
  // The notes of other blocks; nullptr: this block makes its own.
  const RowNotes* notes;
  int parts;
  // The rows loaded last, of the target and of the drafter, and which of the two is later.
  LoadedRow rows[2];
  Side side;

  __device__ const LoadedRow& now() const { return rows[static_cast<int>(side)]; }
  __device__ const LoadedRow& of(Side which) const { return rows[static_cast<int>(which)]; }
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

__device__ inline TopTwo leaders_of(const Row& row, Candidate first) {
  float most = -INFINITY;
  int token = kNoToken;
  row.for_each(0, row.vocab, [&](float score, int v) {
    if (v != first.token && score > most) most = score, token = v;
  });
  return {first, best_of_block({most, token})};
}

// Completes a loaded row from the notes of its parts; one thread.
__device__ inline void add_up(const RowNotes& notes, int parts, LoadedRow& loaded) {
  Candidate drawn = nothing();
  loaded.total = loaded.untempered_total = loaded.moment = 0;
  for (int i = 0; i < parts; ++i) {
    const RowPart& part = notes.parts[i];
    loaded.total += part.total, loaded.untempered_total += part.untempered_total, loaded.moment += part.moment;
    drawn = better(drawn, part.drawn);
  }
  loaded.drawn = static_cast<int>(drawn.token);
}

// Loads a node's row into the state; false if it is no distribution.
__device__ __noinline__ inline bool load_row(const float* logits, const int* index, int node, const uint32_t* mask,
                                             Needs needs, uint64_t* untempered, Side side) {
  SPECENGINE_SHARED(int, path, kMaxNodes);
  SPECENGINE_SHARED(unsigned, path_bits, kPathBits / 32);
  SPECENGINE_SHARED(unsigned, low, kBins);
  SPECENGINE_SHARED(unsigned, high, kBins);
  SPECENGINE_SHARED(uint64_t, sums, kWarp);
  SPECENGINE_SHARED(uint64_t, found, 3);
  SamplerState& state = sampler_state();
  LoadedRow& loaded = state.rows[static_cast<int>(side)];
  const RowNotes* notes = state.notes == nullptr ? nullptr : state.notes + 2 * node + static_cast<int>(side);
  __syncthreads();  // no thread reads the last row any more
  for (int i = threadIdx.x; i < kPathBits / 32; i += blockDim.x) path_bits[i] = 0;
  if (threadIdx.x == 0) {
    state.side = side;
    Row& row = loaded.row;
    row = state.shape, row.logits = logits, row.index = index, row.aligned = state.aligned && index == nullptr,
    row.mask = mask;
    row.path = path, row.path_bits = path_bits, row.depth = state.tree.depth(node);
    row.position = state.root_position + 1 + static_cast<uint32_t>(row.depth);
  }
  __syncthreads();
  Row row = loaded.row;
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

  if (notes != nullptr) {
    const TopTwo tops = top_two(*notes, state.parts);
    float top;
    if (!temper(tops, state.temperature, &top)) return false;
    __syncthreads();  // all threads have copied the row
    if (threadIdx.x == 0) {
      loaded.leaders = tops.leaders(), loaded.top_token = static_cast<int>(tops.first.token);
      loaded.best = static_cast<float>(tops.first.value), loaded.top = top;
      add_up(*notes, state.parts, loaded);
      Row& kept = loaded.row;
      kept.top = top;
      if (state.filters && !state.greedy()) {
        kept.filtered = true, kept.threshold = notes->threshold, kept.last = notes->last, kept.min_p = state.min_p;
      }
    }
    __syncthreads();
    return true;
  }

  row.keep_all(), row.temperature = 0;  // as scores are before temperature and filters
  const Candidate first = best_of_block(most_likely(row, 0, row.vocab));
  if (first.token == kNoToken) return false;
  float top = static_cast<float>(first.value);
  if (threadIdx.x == 0) loaded.best = top, loaded.top_token = static_cast<int>(first.token);
  if (needs.leaders) {
    const Leaders leaders = leaders_of(row, first).leaders();
    if (threadIdx.x == 0) loaded.leaders = leaders;
  }
  if (needs.untempered) {
    const uint64_t total = weigh_scores(row, top, untempered);
    if (threadIdx.x == 0) loaded.untempered_total = total;
  }

  row.temperature = state.temperature;
  if (!state.greedy()) {
    top /= row.temperature;
    if (!(top > -INFINITY && top < INFINITY)) return false;
    row.top = top;
    if (state.filters) shrink(row, state.top_k, state.top_p, state.min_p, {low, high, sums, found});
  }
  if (threadIdx.x == 0) {
    loaded.top = top;
    Row& kept = loaded.row;
    kept.temperature = row.temperature, kept.filtered = row.filtered, kept.threshold = row.threshold;
    kept.last = row.last, kept.top = row.top, kept.min_p = row.min_p;
  }
  __syncthreads();
  return true;
}

// Writes the weights of a row, as the parameters shape it or without temperature and filters.
__device__ __noinline__ inline uint64_t write_weights(uint64_t* weights, Side side, bool untempered) {
  const SamplerState& state = sampler_state();
  const LoadedRow& loaded = state.of(side);
  Row row = loaded.row;
  if (untempered) row.temperature = 0, row.filtered = false;
  if (untempered || !state.greedy()) return weigh_scores(row, untempered ? loaded.best : loaded.top, weights);
  __syncthreads();
  for (int v = threadIdx.x; v < row.vocab; v += blockDim.x) weights[v] = v == loaded.top_token ? fixed_point(1.0f) : 0;
  __syncthreads();
  return fixed_point(1.0f);
}

__device__ __noinline__ inline int draw_from_row() {
  SPECENGINE_SHARED(Candidate, best, kWarp);
  const Row& row = sampler_state().now().row;
  return static_cast<int>(draw(row, 0, row.vocab, best).token);
}

__device__ __noinline__ inline float score_in_row(int token, Side side, bool untempered) {
  Row row = sampler_state().of(side).row;
  if (untempered) row.temperature = 0, row.filtered = false;
  return row.score(token);
}

class BlockSampler {
 public:
  static constexpr bool kDefers = true;

  // notes: of the request's rows, see note_rows.cu; nullptr: the block makes its own.
  // aligned: whether rows of logits with a column per token, and the workspaces, start at multiples of 16 bytes.
  __device__ BlockSampler(const RequestTable& table, int b, const DraftedTree& tree, const DenseShaping& dense,
                          bool aligned, const RowNotes* notes = nullptr, int parts = 0) {
    if (threadIdx.x == 0) {
      SamplerState& state = sampler_state();
      state.tree = tree;
      state.temperature = table.temperature[b], state.filters = table.filters(b), state.aligned = aligned;
      state.top_k = table.top_k[b], state.top_p = table.top_p[b], state.min_p = table.min_p[b];
      state.root_position = static_cast<uint32_t>(table.history_length[b] - 1);
      state.shape = table.row(b, dense), state.side = Side::kTarget, state.notes = notes, state.parts = parts;
      for (LoadedRow& each : state.rows) each.row = state.shape, each.untempered_total = 1;
    }
    __syncthreads();
  }

  __device__ bool load(const float* logits, const int* index, const DraftedTree&, int node, const uint32_t* mask,
                       const Needs& needs, uint64_t* untempered, Side side = Side::kTarget) {
    return load_row(logits, index, node, mask, needs, untempered, side);
  }
  __device__ bool defers() const { return state().notes != nullptr; }
  __device__ uint64_t weigh(uint64_t* weights) const {
    if (!defers()) return write_weights(weights, state().side, false);
    return state().greedy() ? fixed_point(1.0f) : now().total;
  }
  __device__ void write(uint64_t* weights, Side side) const { write_weights(weights, side, false); }
  __device__ void write_untempered(uint64_t* weights, Side side) const { write_weights(weights, side, true); }
  __device__ int draw() const {
    if (state().greedy()) return top_token();
    return defers() ? now().drawn : draw_from_row();
  }
  __device__ int draw_by_weight(const uint64_t* weights) const { return draw_from_weights(*this, weights); }
  __device__ double uniform(int node) const {
    return specengine::uniform(seed(), root_position(), static_cast<uint32_t>(node), NoiseStream::kAccept);
  }

  __device__ float temperature() const { return state().temperature; }
  __device__ Leaders leaders() const { return now().leaders; }
  __device__ int top_token() const { return now().top_token; }
  __device__ uint64_t untempered_total() const { return now().untempered_total; }
  __device__ bool allows(int token) const {
    return state().greedy() || score_in_row(token, state().side, false) > -INFINITY;
  }
  __device__ uint64_t weight(int token) const { return weight(token, state().side); }
  __device__ uint64_t weight(int token, Side side) const {
    const LoadedRow& loaded = state().of(side);
    if (state().greedy()) return token == loaded.top_token ? fixed_point(1.0f) : 0;
    return weight_of(score_in_row(token, side, false), loaded.top);
  }
  __device__ uint64_t untempered_weight(int token, Side side) const {
    return weight_of(score_in_row(token, side, true), state().of(side).best);
  }

  __device__ double entropy() const {
    if (state().greedy()) return 0;
    if (defers()) return entropy_of(now().total, now().moment);
    const Row row = now().row;
    const float top = now().top;
    uint64_t total = 0, moment = 0;
    row.for_each(0, row.vocab, [&](float score, int) {
      const float weight = exp_polynomial<OneLane>(score - top);
      total += fixed_point(weight);
      if (weight > 0) moment += fixed_point(weight * (top - score));
    });
    total = block_total(total);
    return entropy_of(total, block_total(moment));
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

  __device__ int vocab() const { return state().shape.vocab; }
  __device__ uint32_t root_position() const { return state().root_position; }
  __device__ uint64_t seed() const { return state().shape.seed; }

 private:
  __device__ static const SamplerState& state() { return sampler_state(); }
  __device__ static const LoadedRow& now() { return sampler_state().now(); }
  __device__ static double entropy_of(uint64_t total, uint64_t moment) {
    const double all = static_cast<double>(total);
    return std::log(all * 0x1p-40) + static_cast<double>(moment) / all;
  }

  __device__ __noinline__ static int draw_from_weights(BlockSampler sampler, const uint64_t* weights) {
    const Row& row = now().row;
    return specengine::draw_by_weight(sampler, weights, row.vocab, row.seed, row.position, NoiseStream::kBlock,
                                      NoiseStream::kToken);
  }
};

}  // namespace specengine
