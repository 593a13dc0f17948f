// Rows of logits for rules other than `match`: what several blocks note of each node (note_rows.cu) before the walk.
#pragma once
#include "cuda/sampling/tree_rows.cuh"
#include "rules/rows.h"

namespace specengine {

// Threads of a block that owns a node's row, or a part of it.
constexpr int kNoteThreads = 256;
static_assert(kNoteThreads >= kMaxNodes, "a thread reads one node");

struct RuleRows : TreeRows {
  LogitRows logits;  // of all requests
  RowNotes* notes;   // [M]
  Needs needs;
  bool all_nodes;  // notes on leaves too, else on nodes with children, filters or a draft distribution

  __device__ bool has_draft(int index) const {
    return needs.draft && logits.draft != nullptr && logits.draft_rows[index] >= 0;
  }
  // The logits of a side's row. mask: the target's.
  __device__ void place(Row& row, Side side, int index, int draft_row) const {
    if (side == Side::kDraft) {
      row.logits = logits.draft + draft_row * logits.columns, row.index = logits.draft_index, row.mask = nullptr;
    } else {
      row.logits = logits.target + static_cast<int64_t>(index) * logits.vocab, row.index = nullptr;
      row.mask = masks.row(index);
    }
    row.aligned = aligned && row.index == nullptr;
  }
};

// A row as it is without temperature and filters.
__device__ inline Row untempered(const Row& row) {
  Row plain = row;
  plain.keep_all(), plain.temperature = 0;
  return plain;
}

// Calls body(group, scores of four tokens, first token) for the groups of kGroups tokens of a part, a warp a group, all
// its lanes each time. begin: a multiple of kGroups. Four groups are loaded before the first is used.
template <typename Body>
__device__ inline void for_each_group(const Row& row, int begin, int end, const Body& body) {
  constexpr int kAhead = 4;
  const int step = blockDim.x / kWarp * kGroups, lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int group = begin + threadIdx.x / kWarp * kGroups; group < end; group += kAhead * step) {
    float4 x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) x[i] = row.load(group + i * step + 4 * lane, end);
#pragma unroll 1
    for (int i = 0; i < kAhead && group + i * step < end; ++i) {
      const int v = group + i * step + 4 * lane;
      const float4 now = x[0];
#pragma unroll
      for (int j = 0; j + 1 < kAhead; ++j) x[j] = x[j + 1];
      body(row.scores(now, v), v);
    }
  }
}

// The largest of half a warp, and the sum.
__device__ inline float half_warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 4; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}
__device__ inline uint64_t half_warp_sum(uint64_t x) {
#pragma unroll
  for (int offset = kWarp / 4; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// The first level of a draw over a part of a row that starts at a multiple of kGroups: the best noise block; at
// temperature 0 the best token. For whole blocks.
__device__ inline Candidate best_in_part(const Row& row, int begin, int end, Candidate* scratch) {
  if (row.temperature == 0.0f) return block_best(most_likely(row, begin, end), scratch);
  Candidate best = nothing();
  bool sane = true;
  for_each_group(row, begin, end, [&](float4 x, int v) {
    sane = sane && x.x < INFINITY && x.y < INFINITY && x.z < INFINITY && x.w < INFINITY;
    const float highest = half_warp_max(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    const float base = highest > -INFINITY ? highest : 0.0f;
    const uint64_t total =
        half_warp_sum(weight_of(x.x, base) + weight_of(x.y, base) + weight_of(x.z, base) + weight_of(x.w, base));
    if (threadIdx.x % (kWarp / 2) != 0 || highest == -INFINITY) return;
    const uint32_t block = v / kNoiseBlock;
    best = better(best, {block_value(highest, total, row.seed, row.position, block), block});
  });
  return block_best(sane ? best : no_distribution(), scratch);
}

// The second level: a token of a noise block.
__device__ inline int token_in_block(const Row& row, Candidate block, Candidate* scratch) {
  if (row.temperature == 0.0f || block.token == kNoToken) return static_cast<int>(block.token);
  Candidate mine = nothing();
  const int first = static_cast<int>(block.token * kNoiseBlock);
  for (int v = first + threadIdx.x; v < first + kNoiseBlock && v < row.vocab; v += blockDim.x) {
    const float score = row.score(v);
    if (score > -INFINITY) mine = better(mine, {token_value(score, row.seed, row.position, v), v});
  }
  return static_cast<int>(block_best(mine, scratch).token);
}

// The tokens of a part of a row, in whole groups.
__device__ inline Part part_of_groups(int vocab, int part, int parts) {
  const int groups = (vocab + kGroups - 1) / kGroups, share = (groups + parts - 1) / parts * kGroups;
  const int begin = min(part * share, vocab);
  return {begin, min(begin + share, vocab)};
}

}  // namespace specengine
