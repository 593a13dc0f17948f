// What a walk with notes asks of the vocabulary at its node: sums, and draws. The blocks of a request share each, see
// noted_rows.cuh. Weights are not stored: they follow from the logits, the notes and the rule's changes.
#pragma once
#include "cuda/sampling/node_state.cuh"

namespace specengine {

// Makes the rows of the loaded node.
__device__ inline void shape_rows() {
  SPECENGINE_SHARED(int, path, kMaxNodes);
  SPECENGINE_SHARED(unsigned, path_bits, kPathBits / 32);
  __syncthreads();
  for (int i = threadIdx.x; i < kPathBits / 32; i += blockDim.x) path_bits[i] = 0;
  once([&](NodeState& s) {
    Row row = s.shape;
    row.path = path, row.path_bits = path_bits, row.depth = 0;
    for (int n = s.node; n > 0; n = s.tree.parents[n]) {
      const int token = s.tree.tokens[n];
      path[row.depth++] = token;
      path_bits[token % kPathBits / 32] |= 1u << (token % 32);
    }
    row.position = s.root_position + 1 + static_cast<uint32_t>(row.depth);
    const int index = s.first + s.node;
#pragma unroll 1
    for (int i = 0; i < (s.has_draft ? 2 : 1); ++i) {
      s.op.place(row, static_cast<Side>(i), index, i == 0 ? 0 : s.op.logits.draft_rows[index]);
      const SideNotes& notes = s.now().sides[i];
      if (s.now().noted) row.top = notes.top;
      if (s.filters) {
        row.filtered = true, row.threshold = notes.threshold, row.last = notes.last, row.min_p = s.min_p;
      }
      s.rows[i] = row;
    }
  });
}

// Copies for a pass, so that no thread reads shared memory for every token.
struct NodeView {
  Row target, draft;
  Changes changes;
  const uint32_t* mask;
  float best, draft_best, draft_top;
  int top_token, draft_top_token;
  bool both, judged;

  __device__ NodeView() {
    const NodeState& s = node_state();
    const SideNotes *of_target = &s.now().sides[0], *of_draft = &s.now().sides[1];
    both = s.has_draft, judged = both && s.op.needs.untempered;
    target = s.rows[0], draft = s.rows[both ? 1 : 0], changes = s.changes, mask = s.tree.masks.row(s.node);
    best = of_target->best, draft_best = of_draft->best, draft_top = of_draft->top;
    top_token = of_target->top_token, draft_top_token = of_draft->top_token;
  }

  // Calls body(weights, token) for four tokens before the end.
  template <typename Body>
  __device__ void four(int v, int end, const Body& body) const {
    const float4 x = target.load(v, end), y = both ? draft.load(v, end) : float4{};
    const float4 plain = target.untempered(x, v), plain_draft = both ? draft.untempered(y, v) : float4{};
    const float4 scores = target.tempered(plain, v), draft_scores = both ? draft.tempered(plain_draft, v) : float4{};
    const bool greedy = target.temperature == 0.0f;
    const auto weight = [&](float score, float top, int token, int likeliest) {
      if (greedy) return token == likeliest ? fixed_point(1.0f) : uint64_t{0};
      return weight_of(score, top);
    };
#pragma unroll 1
    for (int i = 0; i < 4 && v + i < end; ++i) {
      const auto at = [i](const float4& f) { return i & 2 ? (i & 1 ? f.w : f.z) : (i & 1 ? f.y : f.x); };
      const int token = v + i;
      TokenWeights w{};
      w.target = weight(at(scores), target.top, token, top_token);
      if (judged) w.untempered_target = weight_of(at(plain), best);
      if (both && is_allowed(mask, token)) {
        w.draft = weight(at(draft_scores), draft_top, token, draft_top_token);
        if (judged) w.untempered_draft = weight_of(at(plain_draft), draft_best);
      }
      body(w, token);
    }
  }

  __device__ double value_of(uint64_t weight, int index, NoiseStream stream) const {
    if (weight == 0) return -INFINITY;
    return std::log(static_cast<double>(weight)) +
           gumbel(target.seed, target.position, static_cast<uint32_t>(index), stream);
  }
};

// The part of a row that is the block's share of an operation.
__device__ inline Part share_of_row() {
  const NodeState& s = node_state();
  return s.launch.last ? Part{0, s.shape.vocab} : part_of_groups(s.shape.vocab, s.launch.part, s.launch.parts);
}
// Counts an operation; returns its number.
__device__ inline int next_operation() {
  const int number = node_state().operations;
  once([&](NodeState& s) { s.operations = number + 1; });
  return number;
}
__device__ inline void leave(PartResult result, bool draws) {
  once([&](NodeState& s) { *s.launch.result = result, s.stopped = true, s.draws = draws; });
}

enum class RowSum { kTrusted, kTarget, kDistance };

// A sum over the tokens of the loaded node: of the draft's weights that a mixture trusts, of the target's as changed,
// or of half the L1 distance of the two.
__device__ __noinline__ inline uint64_t node_sum(RowSum kind) {
  SPECENGINE_SHARED(uint64_t, totals, kWarp);
  const NodeState& s = node_state();
  if (s.stopped) return 1;
  const int number = next_operation();
  uint64_t total = 0;
  if (number < s.launch.logged) {
    for (int i = threadIdx.x; i < s.launch.parts; i += blockDim.x)
      total += s.launch.log[number * s.launch.parts + i].bits;
    return block_reduce<Sum>(total, totals);
  }
  shape_rows();
  const NodeView view;
  const Part part = share_of_row();
  const double draft_scale = 1.0 / static_cast<double>(s.draft_total);
  const double target_scale = 1.0 / static_cast<double>(s.target_total);
#pragma unroll 1
  for (int v = part.begin + 4 * threadIdx.x; v < part.end; v += 4 * blockDim.x) {
    view.four(v, part.end, [&](const TokenWeights& w, int token) {
      total += kind == RowSum::kTrusted  ? (view.changes.trusts(w) ? w.draft : 0)
               : kind == RowSum::kTarget ? view.changes.target(w, token)
                                         : WeightArithmetic::left(w.draft, w.target, draft_scale, target_scale);
    });
  }
  total = block_reduce<Sum>(total, totals);
  if (!s.launch.last) leave({total, 0}, false);
  return total;
}

// The best noise block of a part by the weights as changed.
__device__ inline Candidate best_by_weight(const NodeView& view, const Part& part, Candidate* scratch) {
  Candidate best = nothing();
  const int step = blockDim.x / kWarp * kGroups, lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int group = part.begin + threadIdx.x / kWarp * kGroups; group < part.end; group += step) {
    const int v = group + 4 * lane;
    uint64_t total = 0;
    view.four(v, part.end, [&](const TokenWeights& w, int token) { total += view.changes.target(w, token); });
    total = half_warp_sum(total);
    if (lane % (kWarp / 2) != 0 || total == 0) continue;
    const int block = v / static_cast<int>(kNoiseBlock);
    best = better(best, {view.value_of(total, block, NoiseStream::kBlock), block});
  }
  return block_best(best, scratch);
}

// The first level of a draw that is in the log.
__device__ inline Candidate logged_best(int number, Candidate* scratch) {
  const WalkLaunch& launch = node_state().launch;
  Candidate best = nothing();
  for (int i = threadIdx.x; i < launch.parts; i += blockDim.x) {
    const PartResult& part = launch.log[number * launch.parts + i];
    best = better(best, {__builtin_bit_cast(double, part.bits), part.token});
  }
  return block_best(best, scratch);
}

// Draws a token from the loaded node, as rule `match` does.
__device__ __noinline__ inline int draw_token() {
  SPECENGINE_SHARED(Candidate, scratch, kWarp);
  const NodeState& s = node_state();
  if (s.stopped) return kNoToken;
  const int number = next_operation();
  shape_rows();
  const Row& row = s.rows[0];
  Candidate best;
  if (number < s.launch.logged) {
    best = logged_best(number, scratch);
  } else {
    const Part part = share_of_row();
    best = best_in_part(row, part.begin, part.end, scratch);
    if (!s.launch.last) {
      leave({__builtin_bit_cast(uint64_t, best.value), best.token}, true);
      return kNoToken;
    }
  }
  return token_in_block(row, best, scratch);
}

// The same by the weights as changed.
__device__ __noinline__ inline int draw_token_by_weight() {
  SPECENGINE_SHARED(Candidate, scratch, kWarp);
  const NodeState& s = node_state();
  if (s.stopped) return kNoToken;
  const int number = next_operation();
  shape_rows();
  const NodeView view;
  Candidate best;
  if (number < s.launch.logged) {
    best = logged_best(number, scratch);
  } else {
    best = best_by_weight(view, share_of_row(), scratch);
    if (!s.launch.last) {
      leave({__builtin_bit_cast(uint64_t, best.value), best.token}, true);
      return kNoToken;
    }
  }
  if (best.token == kNoToken) return kNoToken;
  Candidate mine = nothing();
  const int first = static_cast<int>(best.token * kNoiseBlock), v = first + 4 * threadIdx.x;
  if (v < first + kNoiseBlock) {
    view.four(v, view.target.vocab, [&](const TokenWeights& w, int token) {
      const uint64_t weight = view.changes.target(w, token);
      if (weight > 0) mine = better(mine, {view.value_of(weight, token, NoiseStream::kToken), token});
    });
  }
  return static_cast<int>(block_best(mine, scratch).token);
}

}  // namespace specengine
