// The node that a walk with notes has loaded, and what its rule has changed there. In shared memory: all threads of a
// block run the rule, and thread 0 writes.
#pragma once
#include "cuda/sampling/rule_rows.cuh"

#if defined(__CUDACC__)
#pragma nv_diag_suppress 20014  // rules are for host and device, these rows only for the device
#endif

namespace specengine {

constexpr int kWalkThreads = 128;  // all of them run the rule: more would wait longer for each other

// A part's result of an operation: a sum, or the bits of a candidate's value.
struct PartResult {
  uint64_t bits;
  int64_t token;
};

// Where a block stands in the launches of a walk; see noted_rows.cuh.
struct WalkLaunch {
  const PartResult* log;  // [operation][parts]
  PartResult* result;     // of this block
  int logged;             // operations in the log
  int part, parts;        // of a row, that are blocks of this request; parts of the log
  bool last;              // the block does all that is left, on whole rows
};

// The four weights of a token before any change.
struct TokenWeights {
  uint64_t target, draft, untempered_target, untempered_draft;
};

// A refused or lowered child.
struct Change {
  double target_scale, draft_scale;
  uint64_t weight;
  int token;
  bool takes;  // the target becomes what the draft leaves of it
  bool drops;  // the draft loses the token
  bool sets;   // the target's weight of the token becomes `weight`
};

enum class Mode { kNone, kKeepDraft, kMix };

// The changes of a node's target: first a mixture with the draft, then refused children in turn.
struct Changes : protected WeightArithmetic {
  Mode mode;
  Side judge;            // of a mixture: whose untempered probability decides which tokens keep the draft's,
  double least;          // by being at least this,
  uint64_t judge_total;  // and the sum of its weights
  double mix_scale, mix_rest;
  int count;
  const Change* list;

  __device__ bool trusts(const TokenWeights& w) const {
    return share(judge == Side::kDraft ? w.untempered_draft : w.untempered_target, judge_total) >= least;
  }
  __device__ uint64_t target(const TokenWeights& w, int token) const {
    uint64_t target = w.target, draft = w.draft;
    if (mode == Mode::kKeepDraft) target = draft;
    if (mode == Mode::kMix) target = mixed(target, draft, trusts(w), mix_scale, mix_rest);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Change& change = list[i];
      if (change.takes) target = left(target, draft, change.target_scale, change.draft_scale);
      if (change.token != token) continue;
      if (change.drops) draft = 0;
      if (change.sets) target = change.weight;
    }
    return target;
  }
  __device__ uint64_t draft(uint64_t draft, int token) const {
    for (int i = 0; i < count; ++i) {
      if (list[i].drops && list[i].token == token) return 0;
    }
    return draft;
  }
};

constexpr int kNotDrawn = -2;
constexpr uint64_t kUnknownMass = ~uint64_t{0};

struct NodeState {
  // The request.
  RuleRows op;
  WalkLaunch launch;
  DraftedTree tree;
  Row shape;
  float min_p;
  bool filters;
  uint32_t root_position;
  int first;
  // Of its nodes, in shared memory.
  const NodeNotes* notes;
  const int16_t *first_child, *next_sibling;  // [nodes], -1: none; children that masks forbid are left out
  const uint64_t* prepared_sums;              // [nodes][kMaxPrepared]
  int have_prepared;                          // how many of them are known
  uint64_t* masses;                           // [nodes] what a refused child has left; kUnknownMass at first
  double* values;                             // [nodes]
  int* marks;                                 // [nodes]
  // The walk.
  int operations;
  bool stopped, draws;  // draws: it stopped at a draw, behind which every walk ends
  // The node.
  int node, drawn, prepared;
  bool has_draft, changed;
  uint64_t target_total, processed_total, draft_total;
  Changes changes;
  Row rows[2];  // of target and drafter
  Change list[kMaxNodes];

  __device__ const NodeNotes& now() const { return notes[node]; }

  // Thread 0 begins a walk, before a barrier. The caller sets the pointers to shared memory.
  __device__ void begin(const RuleRows& rows_of_all, int b, const DraftedTree& of_request, const WalkLaunch& where) {
    op = rows_of_all, launch = where, tree = of_request, shape = op.table.row(b, op.dense(b));
    min_p = op.table.min_p[b], filters = op.table.filters(b);
    root_position = static_cast<uint32_t>(op.table.history_length[b] - 1), first = op.row_start[b];
    operations = 0, stopped = draws = false, node = -1;
    changes = Changes{}, changes.list = list;
  }
};
__device__ inline NodeState& node_state() {
  SPECENGINE_SHARED(NodeState, state, 1);
  return state[0];
}

// One thread calls f(), all see what it has written.
template <typename F>
__device__ inline void once(const F& f) {
  __syncthreads();
  if (threadIdx.x == 0) f(node_state());
  __syncthreads();
}

}  // namespace specengine
