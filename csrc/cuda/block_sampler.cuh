// The Sampler of rules/rows.h with a block of threads: all of them run the rule and get the same answers. Blocks of
// whole warps, of at least kNoiseBlock threads. Nothing is copied: scores are made anew in every pass over a row.
#pragma once
#include "cuda/filters.cuh"
#include "cuda/sequences.cuh"
#include "rules/rows.h"

#if defined(__CUDACC__)
#pragma nv_diag_suppress 20014  // rules are for host and device, this sampler only for the device
#endif

namespace specengine {

constexpr int kRuleThreads = 512;
// Small vocabularies keep few threads busy.
inline int rule_threads(int64_t vocab) { return vocab <= 1024 ? kNoiseBlock : kRuleThreads; }

// Shared memory of a sampler.
struct SamplerScratch {
  Bins bins;
  uint64_t* totals;     // [32]
  Candidate* best;      // [32]
  int* path;            // [kMaxNodes]
  unsigned* path_bits;  // [kPathBits / 32]
};
#define SPECENGINE_SAMPLER_SCRATCH(name)                                                                            \
  SPECENGINE_SHARED(unsigned, name##_low, kBins);                                                                   \
  SPECENGINE_SHARED(unsigned, name##_high, kBins);                                                                  \
  SPECENGINE_SHARED(uint64_t, name##_sums, kWarp);                                                                  \
  SPECENGINE_SHARED(uint64_t, name##_found, 3);                                                                     \
  SPECENGINE_SHARED(uint64_t, name##_totals, kWarp);                                                                \
  SPECENGINE_SHARED(Candidate, name##_best, kWarp);                                                                 \
  SPECENGINE_SHARED(int, name##_path, kMaxNodes);                                                                   \
  SPECENGINE_SHARED(unsigned, name##_path_bits, kPathBits / 32);                                                    \
  const SamplerScratch name {                                                                                       \
    {name##_low, name##_high, name##_sums, name##_found}, name##_totals, name##_best, name##_path, name##_path_bits \
  }

class BlockSampler {
 public:
  // aligned: whether rows of logits with a column per token, and the workspaces, start at multiples of 16 bytes.
  __device__ BlockSampler(const SequenceTable& table, int b, const DenseShaping& dense, bool aligned,
                          const SamplerScratch& scratch)
      : table_(table), scratch_(scratch), row_(table.row(b, dense)), b_(b), aligned_(aligned) {
    row_.path = scratch.path, row_.path_bits = scratch.path_bits;
  }

  __device__ bool load(const float* logits, const int* index, const DraftedTree& tree, int node, const Needs& needs,
                       uint64_t* untempered) {
    row_.logits = logits, row_.index = index, row_.aligned = aligned_ && index == nullptr;
    row_.depth = tree.depth(node);
    row_.position = root_position() + 1 + static_cast<uint32_t>(row_.depth);
    if (row_.counts != nullptr) note_path(tree, node);

    row_.filtered = false, row_.temperature = 0;  // as scores are before temperature and filters
    row_.threshold = 0, row_.last = INT_MAX, row_.min_p = 0;
    const Candidate first = block_best(most_likely(row_, 0, row_.vocab), scratch_.best);
    if (first.token == kNoToken) return false;
    top_token_ = static_cast<int>(first.token), top_ = static_cast<float>(first.value);
    if (needs.leaders) find_leaders();
    if (needs.untempered) untempered_total_ = weigh_scores(untempered);

    row_.temperature = table_.temperature[b_];
    if (row_.temperature == 0.0f) return true;
    top_ /= row_.temperature;
    if (!(top_ > -INFINITY && top_ < INFINITY)) return false;
    if (table_.filters(b_)) {
      row_.top = top_;
      shrink(row_, table_.top_k[b_], table_.top_p[b_], table_.min_p[b_], scratch_.bins);
    }
    return true;
  }

  __device__ int draw() const {
    return greedy() ? top_token_ : static_cast<int>(specengine::draw(row_, 0, row_.vocab, scratch_.best).token);
  }
  __device__ int draw_by_weight(const uint64_t* weights) const {
    return specengine::draw_by_weight(*this, weights, row_.vocab, row_.seed, row_.position, NoiseStream::kBlock,
                                      NoiseStream::kToken);
  }
  __device__ double uniform(int node) const {
    return specengine::uniform(row_.seed, root_position(), static_cast<uint32_t>(node), NoiseStream::kAccept);
  }

  __device__ float temperature() const { return row_.temperature; }
  __device__ Leaders leaders() const { return leaders_; }
  __device__ int top_token() const { return top_token_; }
  __device__ uint64_t untempered_total() const { return untempered_total_; }
  __device__ bool allows(int token) const { return greedy() || row_.score(token) > -INFINITY; }

  __device__ uint64_t weight(int token) const {
    if (greedy()) return token == top_token_ ? fixed_point(1.0f) : 0;
    return weight_of(row_.score(token), top_);
  }
  __device__ uint64_t weigh(uint64_t* weights) const {
    if (!greedy()) return weigh_scores(weights);
    return sum([&](int64_t v) { return weights[v] = v == top_token_ ? fixed_point(1.0f) : 0; });
  }

  __device__ double entropy() const {
    if (greedy()) return 0;
    uint64_t total = 0, moment = 0;
    row_.for_each(0, row_.vocab, [&](float score, int) {
      const float weight = exp_polynomial<OneLane>(score - top_);
      total += fixed_point(weight);
      if (weight > 0) moment += fixed_point(weight * (top_ - score));
    });
    const double all = static_cast<double>(block_reduce<Sum>(total, scratch_.totals));
    return std::log(all * 0x1p-40) + static_cast<double>(block_reduce<Sum>(moment, scratch_.totals)) / all;
  }

  // f may write its token's entry: the block has read what it needs of it before, and sees it after.
  template <typename F>
  __device__ uint64_t sum(const F& f) const {
    __syncthreads();
    uint64_t total = 0;
    for (int v = threadIdx.x; v < row_.vocab; v += blockDim.x) total += f(v);
    return block_reduce<Sum>(total, scratch_.totals);
  }
  template <typename F>
  __device__ int64_t best(int64_t begin, int64_t end, const F& f) const {
    Candidate found = nothing();
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      const double value = f(i);
      if (value > found.value) found = {value, i};
    }
    return block_best(found, scratch_.best).token;
  }
  template <typename T>
  __device__ void set(T* address, T value) const {
    __syncthreads();
    if (threadIdx.x == 0) *address = value;
    __syncthreads();
  }

  __device__ int64_t vocab() const { return row_.vocab; }
  __device__ uint32_t root_position() const { return static_cast<uint32_t>(table_.history_length[b_] - 1); }
  __device__ uint64_t seed() const { return row_.seed; }

 private:
  __device__ bool greedy() const { return row_.temperature == 0.0f; }

  __device__ void note_path(const DraftedTree& tree, int node) const {
    __syncthreads();  // the last row's path is not read any more
    if (threadIdx.x < kPathBits / 32) scratch_.path_bits[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; node > 0; node = tree.parent(node), ++i) {
        const int token = tree.token(node);
        scratch_.path[i] = token;
        scratch_.path_bits[token % kPathBits / 32] |= 1u << (token % 32);
      }
    }
    __syncthreads();
  }

  __device__ void find_leaders() {
    float most = -INFINITY;
    int token = kNoToken;
    row_.for_each(0, row_.vocab, [&](float score, int v) {
      if (v != top_token_ && score > most) most = score, token = v;
    });
    const Candidate second = block_best({most, token}, scratch_.best);
    leaders_ = {{top_token_, top_},
                {second.token == kNoToken ? 0 : static_cast<int>(second.token), static_cast<float>(second.value)}};
  }

  __device__ uint64_t weigh_scores(uint64_t* weights) const {
    __syncthreads();  // what the weights were is not read any more
    uint64_t total = 0;
    row_.for_each(0, row_.vocab, [&](float score, int v) {
      if (v < row_.vocab) total += weights[v] = weight_of(score, top_);
    });
    return block_reduce<Sum>(total, scratch_.totals);
  }

  const SequenceTable& table_;
  const SamplerScratch& scratch_;
  Row row_;
  int b_;
  bool aligned_;
  int top_token_ = 0;
  float top_ = 0;  // the largest score
  uint64_t untempered_total_ = 1;
  Leaders leaders_{};
};

}  // namespace specengine
