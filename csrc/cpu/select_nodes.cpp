// One task per request: the key of the last candidate to keep, then the kept ones in order.
#include "ops/select_nodes.h"

#include <algorithm>
#include <functional>

#include "cpu/parallel_for.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// One request's candidates.
struct Candidates {
  const int32_t *parents, *depths;
  const float* scores;
  int64_t count;
  int32_t limit;

  Candidates(const SelectNodes& op, int64_t b) : count(op.tokens.shape[1]), limit(op.limits.as<int32_t>()[b]) {
    parents = op.parents.as<int32_t>() + b * count, depths = op.depths.as<int32_t>() + b * count;
    scores = op.scores.as<float>() + b * count;
  }
  bool exists(int64_t i) const { return depths[i] >= 0; }
  bool selectable(int64_t i) const { return i > 0 && exists(i) && depths[i] <= limit; }
  uint64_t key(int64_t i) const { return selection_key(scores[i], static_cast<int>(i)); }

  void validate(int64_t b) const {
    if (limit < 0) return;
    for (int64_t i = 0; i < count; ++i) {
      const auto refuse = [&](const char* name, const auto&... what) {
        fail(name, ": candidate ", i, " of request ", b, " has ", what...);
      };
      const int32_t parent = parents[i], depth = depths[i];
      if (depth == -1) continue;
      if (i == 0 && depth != 0) refuse("depths", "depth ", depth, ", expected 0 (or -1: none)");
      if (i == 0 && parent != -1) refuse("parents", "parent ", parent, ", expected -1 of the root");
      if (scores[i] != scores[i]) refuse("scores", "NaN");
      if (i == 0) continue;
      if (parent < 0 || parent >= i || !exists(parent)) {
        refuse("parents", "parent ", parent, ", expected an earlier candidate");
      }
      if (depth != depths[parent] + 1) {
        refuse("depths", "depth ", depth, ", expected ", depths[parent] + 1, ", one below its parent (or -1: none)");
      }
      if (scores[i] > scores[parent]) {
        refuse("scores", scores[i], ", expected at most its parent's ", scores[parent]);
      }
    }
  }

  // The lowest key that is kept beside the root.
  uint64_t lowest_kept(int64_t wanted) const {
    uint64_t keys[kMaxCandidates];
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (selectable(i)) keys[found++] = key(i);
    }
    if (found <= wanted) return 0;
    std::nth_element(keys, keys + wanted, keys + found, std::greater<>());
    return keys[wanted] + 1;  // one above the first dropped key; no two keys are equal
  }
};

void select(const SelectNodes& op, int64_t b) {
  const int64_t N = op.out_tokens.shape[1], words = op.ancestors.shape[2];
  int32_t* tokens = op.out_tokens.as<int32_t>() + b * N;
  int32_t* parents = op.out_parents.as<int32_t>() + b * N;
  int32_t* depths = op.out_depths.as<int32_t>() + b * N;
  int32_t* kept = op.kept.as<int32_t>() + b * N;
  uint32_t* ancestors = op.ancestors.as<uint32_t>() + b * N * words;
  std::fill(tokens, tokens + N, -1), std::fill(parents, parents + N, -1), std::fill(depths, depths + N, -1);
  std::fill(kept, kept + N, -1), std::fill(ancestors, ancestors + N * words, 0u);
  op.node_counts.as<int32_t>()[b] = 0;

  const Candidates from(op, b);
  if (from.limit < 0 || !from.exists(0)) return;
  const uint64_t lowest = from.lowest_kept(N - 1);
  int32_t node_of[kMaxCandidates], count = 0;
  for (int64_t i = 0; i < from.count; ++i) {
    if (i > 0 && !(from.selectable(i) && from.key(i) >= lowest)) continue;
    const int32_t node = node_of[i] = count++;
    const int32_t parent = i == 0 ? -1 : node_of[from.parents[i]];
    tokens[node] = op.tokens.as<int32_t>()[b * from.count + i], parents[node] = parent;
    depths[node] = from.depths[i], kept[node] = static_cast<int32_t>(i);
    for (int64_t w = 0; w < words && parent >= 0; ++w) ancestors[node * words + w] = ancestors[parent * words + w];
    ancestors[node * words + node / 32] |= 1u << (node % 32);
  }
  op.node_counts.as<int32_t>()[b] = count;
}

}  // namespace

void run(const SelectNodes& op) {
  const int64_t B = op.limits.shape[0];
  for (int64_t b = 0; b < B; ++b) Candidates(op, b).validate(b);
  parallel_for(B, [&](int64_t b) { select(op, b); });
}

}  // namespace specengine::SPECENGINE_ISA
