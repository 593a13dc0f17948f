// The rows of rules/rows.h for a walk that reads notes (note_rows.cu). All threads of a block run the rule and get the
// same answers. Nothing is written to a row of weights: a weight follows from the logits, the notes and the changes that
// the rule has made, so several blocks can run one walk.
//
// Only sums over the vocabulary and draws from it need a row. Launch k of a walk repeats it up to its k-th such
// operation, with the results of the earlier ones, which earlier launches have left in a log by parts of the row. The
// blocks of a request share that operation and stop. The last launch has a block per request, which does all that is
// left.
#pragma once
#include "cuda/sampling/rule_rows.cuh"

#if defined(__CUDACC__)
#pragma nv_diag_suppress 20014  // rules are for host and device, these rows only for the device
#endif

namespace specengine {

constexpr int kWalkThreads = 256;
static_assert(kWalkThreads >= kMaxNodes);

// A part's result of an operation: a sum, or the bits of a candidate's value.
struct PartResult {
  uint64_t bits;
  int64_t token;
};

// Where a block stands in the launches of a walk.
struct WalkLaunch {
  const PartResult* log;  // [operation][parts]
  PartResult* result;     // of this block
  int logged;       // operations in the log
  int part, parts;  // of a row, that are blocks of this request; parts of the log
  bool last;        // the block does all that is left, on whole rows
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

// The loaded node, and the rule's changes to it. In shared memory: thread 0 writes it between barriers.
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
  const NodeNotes* notes;         // of its nodes, in shared memory
  const uint64_t* prepared_sums;  // [nodes][kMaxPrepared], in shared memory
  int have_prepared;              // how many of them are known
  uint64_t* masses;               // [nodes], in shared memory: what a refused child has left; kUnknownMass at first
  double* values;                 // [nodes], in shared memory
  int* marks;                     // [nodes], in shared memory
  // The walk.
  int operations;
  bool stopped;
  // The node.
  int node, drawn, changes;
  bool has_draft, changed;
  uint64_t target_total, processed_total, draft_total;
  Mode mode;
  Side judge;
  double least, mix_scale, mix_rest;
  int prepared;
  // Its rows: target, drafter, and both without temperature and filters.
  Row rows[4];
  Change list[kMaxNodes];
};
__device__ inline NodeState& node_state() {
  SPECENGINE_SHARED(NodeState, state, 1);
  return state[0];
}

// The four weights of a token before any change.
struct TokenWeights {
  uint64_t target, draft, untempered_target, untempered_draft;
};

enum class RowSum { kTrusted, kTarget, kDistance };

class NotedRows : public DraftedTree, protected WeightArithmetic {
 public:
  __device__ explicit NotedRows(const DraftedTree& tree) : DraftedTree(tree) {}

  // Thread 0 begins a walk, before a barrier. Other fields of the request are set by the caller.
  __device__ static void begin(const RuleRows& op, int b, const DraftedTree& tree, const WalkLaunch& launch) {
    NodeState& s = node_state();
    s.op = op, s.launch = launch;
    s.tree = tree, s.shape = op.table.row(b, op.dense(b));
    s.min_p = op.table.min_p[b], s.filters = op.table.filters(b);
    s.root_position = static_cast<uint32_t>(op.table.history_length[b] - 1), s.first = op.row_start[b];
    s.operations = 0, s.stopped = false, s.node = -1;
  }
  __device__ bool stopped() const { return state().stopped; }

  __device__ bool load(int node, const Needs&) {
    const NodeNotes& notes = state().notes[node];
    if (stopped() || (notes.noted && !(notes.sides[0].sound && notes.sides[1].sound))) return false;
    once([&] {
      NodeState& s = node_state();
      s.node = node, s.drawn = kUnknown, s.changes = 0, s.changed = false, s.mode = Mode::kNone, s.prepared = 0;
      s.has_draft = notes.noted && notes.has_draft;
      s.target_total = s.processed_total = notes.sides[0].total, s.draft_total = notes.sides[1].total;
    });
    return true;
  }
  __device__ int loaded() const { return state().node; }

  __device__ int drawn() {
    const NodeNotes& notes = now();
    if (notes.noted && (greedy() || state().op.needs.drawn)) return notes.drawn;
    if (state().drawn == kUnknown) {
      const int token = pick(false);
      once([&] { node_state().drawn = token; });
    }
    return state().drawn;
  }
  __device__ Leaders leaders() const {
    return {{now().sides[0].top_token, now().sides[0].best}, {now().second_token, now().second}};
  }
  __device__ float temperature() const { return state().shape.temperature; }
  __device__ bool greedy() const { return temperature() == 0.0f; }
  __device__ bool allows(int token) const {  // one of the leaders
    return greedy() || (now().allowed & (token == now().sides[0].top_token ? 1 : 2)) != 0;
  }
  __device__ double entropy() const {
    if (greedy()) return 0;
    const double all = static_cast<double>(now().sides[0].total);
    return std::log(all * 0x1p-40) + static_cast<double>(now().moment) / all;
  }
  __device__ double processed_prob(int token) const {
    return share(known_weights(token).target, state().processed_total);
  }

  __device__ double target_prob(int token) const {
    return share(target_after(known_weights(token), token), state().target_total);
  }
  __device__ bool has_draft() const { return state().has_draft; }
  __device__ double draft_prob(int token) const {
    if (!has_draft()) return 1.0;
    return share(draft_after(known_weights(token).draft, token), state().draft_total);
  }
  __device__ bool changed() const { return state().changed; }
  __device__ int residual() { return changed() ? pick(true) : drawn(); }

  __device__ double untempered_target_prob(int token) const {
    const uint64_t weight = has_draft() && token == now().draft_top_token ? now().target_at_draft_top
                                                                          : known_weights(token).untempered_target;
    return share(weight, now().sides[0].untempered_total);
  }
  __device__ double untempered_draft_prob(int token) const {
    return has_draft() ? share(known_weights(token).untempered_draft, now().sides[1].untempered_total) : 1.0;
  }
  __device__ double untempered_target_top() const { return share(kOne, now().sides[0].untempered_total); }
  __device__ double untempered_draft_top() const {
    return share(now().draft_top_weight, now().sides[1].untempered_total);
  }
  __device__ int draft_top_token() const { return now().draft_top_token; }

  // After a stop everything is accepted, so that every rule ends soon.
  __device__ bool accepts(int node, double probability) const {
    const NodeState& s = state();
    return s.stopped ||
           uniform(s.shape.seed, s.root_position, static_cast<uint32_t>(node), NoiseStream::kAccept) <= probability;
  }

  __device__ double reject(int child, double scale) {
    const int refused = token(child);
    const NodeState& s = state();
    const TokenWeights known = known_weights(refused);
    if (!s.has_draft) {
      const uint64_t rest = s.target_total - target_after(known, refused);
      if (rest == 0) {
        once([&] { node_state().changed = true; });
        return 0;
      }
      const double mass = scale * share(rest, s.target_total);
      set(refused, 0, rest);
      return mass;
    }
    const double most = scale > 1 ? scale : 1.0;
    const uint64_t draft_weight = draft_after(known.draft, refused);
    once([&] {
      NodeState& n = node_state();
      n.list[n.changes++] = {scale / most / static_cast<double>(n.target_total),
                             1.0 / most / static_cast<double>(n.draft_total),
                             0,
                             refused,
                             true,
                             !state().op.logits.replacement,
                             false};
      n.changed = true;
    });
    if (state().masses[child] == kUnknownMass) {
      const uint64_t found = sum(RowSum::kTarget);
      once([&] { state().masses[child] = found; });
    }
    const uint64_t mass = state().masses[child];
    once([&] {
      NodeState& n = node_state();
      if (mass > 0) n.target_total = mass;
      n.list[n.changes - 1].takes = mass > 0;  // else the target stays as it was
      if (!state().op.logits.replacement) n.draft_total -= draft_weight;
    });
    return static_cast<double>(mass) / kUnit * most;
  }

  __device__ void lower(int token, double by) {
    const uint64_t total = state().target_total, before = target_after(known_weights(token), token);
    const double left_over = share(before, total) - by;
    const uint64_t weight = left_over > 0 ? static_cast<uint64_t>(left_over * static_cast<double>(total)) : 0;
    if (total - before + weight != 0) set(token, weight, total - before + weight);
  }

  __device__ double distance() { return static_cast<double>(row_sum(RowSum::kDistance)) / kUnit; }
  __device__ void keep_draft() {
    once([&] {
      NodeState& n = node_state();
      n.mode = Mode::kKeepDraft, n.target_total = n.draft_total, n.changed = true;
    });
  }
  __device__ void mix(Side judge, double least) {
    once([&] { node_state().judge = judge, node_state().least = least; });
    const uint64_t trusted = row_sum(RowSum::kTrusted);
    if (trusted == 0) return;
    once([&] {
      NodeState& n = node_state();
      n.mode = Mode::kMix, n.changed = true;
      n.mix_scale = 1.0 / static_cast<double>(n.draft_total);
      n.mix_rest = share(n.draft_total - trusted, n.draft_total) / static_cast<double>(n.target_total);
    });
    const uint64_t total = row_sum(RowSum::kTarget);
    once([&] { node_state().target_total = total; });
  }

  __device__ void note(int node, double value, int mark) {
    once([&] { state().values[node] = value, state().marks[node] = mark; });
  }
  __device__ double value(int node) const { return state().values[node]; }
  __device__ int mark(int node) const { return state().marks[node]; }

  static constexpr uint64_t kUnknownMass = ~uint64_t{0};

 private:
  static constexpr int kUnknown = -2;
  __device__ static const NodeState& state() { return node_state(); }
  __device__ static const NodeNotes& now() { return state().notes[state().node]; }

  template <typename F>
  __device__ static void once(const F& f) {
    __syncthreads();
    if (threadIdx.x == 0) f();
    __syncthreads();
  }

  __device__ static void set(int token, uint64_t weight, uint64_t total) {
    once([&] {
      NodeState& n = node_state();
      n.list[n.changes++] = {0, 0, weight, token, false, false, true};
      n.target_total = total, n.changed = true;
    });
  }

  // The weights of a child's token, which the notes have.
  __device__ static TokenWeights known_weights(int wanted) {
    const int node = state().node;
    for (int child = node + 1; child < state().tree.count; ++child) {
      if (state().tree.parents[child] != node || state().tree.tokens[child] != wanted) continue;
      const SideNotes *target = &state().notes[child].sides[0], *draft = &state().notes[child].sides[1];
      return {target->weight, draft->weight, target->untempered_weight, draft->untempered_weight};
    }
    return {};
  }

  __device__ static uint64_t draft_after(uint64_t draft, int token) {
    const NodeState& s = state();
    for (int i = 0; i < s.changes; ++i) {
      if (s.list[i].drops && s.list[i].token == token) return 0;
    }
    return draft;
  }
  __device__ static bool trusts(const TokenWeights& w) {
    const bool draft = state().judge == Side::kDraft;
    return share(draft ? w.untempered_draft : w.untempered_target, now().sides[draft].untempered_total) >=
           state().least;
  }
  __device__ static uint64_t target_after(const TokenWeights& w, int token) {
    const NodeState& s = state();
    uint64_t target = w.target, draft = w.draft;
    if (s.mode == Mode::kKeepDraft) target = draft;
    if (s.mode == Mode::kMix) target = mixed(target, draft, trusts(w), s.mix_scale, s.mix_rest);
#pragma unroll 1
    for (int i = 0; i < s.changes; ++i) {
      const Change& change = s.list[i];
      if (change.takes) target = left(target, draft, change.target_scale, change.draft_scale);
      if (change.token != token) continue;
      if (change.drops) draft = 0;
      if (change.sets) target = change.weight;
    }
    return target;
  }

  // The next sum that depends on the loaded node alone; a launch before the walk may have prepared it.
  __device__ static uint64_t row_sum(RowSum kind) {
    const int slot = state().prepared;
    if (slot < state().have_prepared) {
      once([&] { node_state().prepared = slot + 1; });
      return state().prepared_sums[state().node * kMaxPrepared + slot];
    }
    return sum(kind);
  }

  // The part of a row that is the block's share of the next operation.
  __device__ static Part share_of_row() {
    const int vocab = state().shape.vocab;
    return state().launch.last ? Part{0, vocab} : part_of_groups(vocab, state().launch.part, state().launch.parts);
  }
  // Counts an operation; returns its number.
  __device__ static int next_operation() {
    const int number = state().operations;
    once([&] { node_state().operations = number + 1; });
    return number;
  }
  __device__ static void leave(PartResult result) {
    once([&] {
      *state().launch.result = result;
      node_state().stopped = true;
    });
  }

  __device__ __noinline__ static uint64_t sum(RowSum kind) {
    SPECENGINE_SHARED(uint64_t, totals, kWarp);
    if (state().stopped) return 1;
    const int number = next_operation();
    uint64_t total = 0;
    if (number < state().launch.logged) {
      for (int i = threadIdx.x; i < state().launch.parts; i += blockDim.x) {
        total += state().launch.log[number * state().launch.parts + i].bits;
      }
      return block_reduce<Sum>(total, totals);
    }
    shape_rows();
    const Part part = share_of_row();
    const NodeState& s = state();
    for_each_four(part, [&](const TokenWeights& w, int v) {
      if (kind == RowSum::kTrusted) {
        total += trusts(w) ? w.draft : 0;
      } else if (kind == RowSum::kTarget) {
        total += target_after(w, v);
      } else {
        total += left(w.draft, w.target, 1.0 / static_cast<double>(s.draft_total),
                      1.0 / static_cast<double>(s.target_total));
      }
    });
    total = block_reduce<Sum>(total, totals);
    if (!state().launch.last) leave({total, 0});
    return total;
  }

  // Draws a token from the loaded node: by the weights as changed, or as rule `match` draws.
  __device__ __noinline__ static int pick(bool by_weight) {
    SPECENGINE_SHARED(Candidate, scratch, kWarp);
    if (state().stopped) return kNoToken;
    const int number = next_operation();
    Candidate best = nothing();
    shape_rows();
    const Row& row = state().rows[0];
    if (number < state().launch.logged) {
      for (int i = threadIdx.x; i < state().launch.parts; i += blockDim.x) {
        const PartResult& part = state().launch.log[number * state().launch.parts + i];
        best = better(best, {__builtin_bit_cast(double, part.bits), part.token});
      }
      best = block_best(best, scratch);
    } else {
      const Part part = share_of_row();
      best = by_weight ? best_by_weight(part, scratch) : best_in_part(row, part.begin, part.end, scratch);
      if (!state().launch.last) {
        leave({__builtin_bit_cast(uint64_t, best.value), best.token});
        return kNoToken;
      }
    }
    if (!by_weight || best.token == kNoToken) return token_in_block(row, best, scratch);
    Candidate mine = nothing();
    const int first = static_cast<int>(best.token * kNoiseBlock);
    for (int v = first + threadIdx.x; v < first + kNoiseBlock && v < row.vocab; v += blockDim.x) {
      const int four = v / 4 * 4;
      uint64_t weight = 0;
      weights_of_four(four, row.vocab, [&](const TokenWeights& w, int token) {
        if (token == v) weight = target_after(w, token);
      });
      mine = better(mine, {value_of(weight, v, NoiseStream::kToken), v});
    }
    return static_cast<int>(block_best(mine, scratch).token);
  }

  __device__ static double value_of(uint64_t weight, int index, NoiseStream stream) {
    const Row& row = state().rows[0];
    if (weight == 0) return -INFINITY;
    return std::log(static_cast<double>(weight)) +
           gumbel(row.seed, row.position, static_cast<uint32_t>(index), stream);
  }

  // The best noise block of a part by the weights as changed.
  __device__ static Candidate best_by_weight(const Part& part, Candidate* scratch) {
    Candidate best = nothing();
    const int step = blockDim.x / kWarp * kGroups, lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int group = part.begin + threadIdx.x / kWarp * kGroups; group < part.end; group += step) {
      const int v = group + 4 * lane;
      uint64_t total = 0;
      weights_of_four(v, part.end, [&](const TokenWeights& w, int token) { total += target_after(w, token); });
      total = half_warp_sum(total);
      if (lane % (kWarp / 2) != 0) continue;
      const int block = v / static_cast<int>(kNoiseBlock);
      best = better(best, {value_of(total, block, NoiseStream::kBlock), total == 0 ? kNoToken : block});
    }
    return block_best(best, scratch);
  }

  template <typename Body>
  __device__ static void for_each_four(const Part& part, const Body& body) {
#pragma unroll 1
    for (int v = part.begin + 4 * threadIdx.x; v < part.end; v += 4 * blockDim.x) weights_of_four(v, part.end, body);
  }

  // Calls body(weights, token) for four tokens of the loaded node that are before the end.
  template <typename Body>
  __device__ static void weights_of_four(int v, int end, const Body& body) {
    const NodeState& s = state();
    const bool both = s.has_draft, judged = both && state().op.needs.untempered;
    const float4 x = s.rows[0].load(v, end);
    const float4 y = both ? s.rows[1].load(v, end) : float4{};
    const float4 target = s.rows[0].scores(x, v), draft = both ? s.rows[1].scores(y, v) : float4{};
    const float4 plain_target = judged ? s.rows[2].scores(x, v) : float4{};
    const float4 plain_draft = judged ? s.rows[3].scores(y, v) : float4{};
    const uint32_t* mask = s.tree.masks.row(s.node);
    const SideNotes *of_target = &now().sides[0], *of_draft = &now().sides[1];
#pragma unroll 1
    for (int i = 0; i < 4 && v + i < end; ++i) {
      const auto at = [i](const float4& four) { return i & 2 ? (i & 1 ? four.w : four.z) : (i & 1 ? four.y : four.x); };
      const int token = v + i;
      TokenWeights w{};
      w.target = weight(at(target), token, *of_target);
      if (both && is_allowed(mask, token)) {
        w.draft = weight(at(draft), token, *of_draft);
        if (judged) w.untempered_draft = weight_of(at(plain_draft), of_draft->best);
      }
      if (judged) w.untempered_target = weight_of(at(plain_target), of_target->best);
      body(w, token);
    }
  }
  __device__ static uint64_t weight(float score, int token, const SideNotes& notes) {
    if (state().shape.temperature == 0.0f) return token == notes.top_token ? fixed_point(1.0f) : 0;
    return weight_of(score, notes.top);
  }

  // Makes the rows of the loaded node.
  __device__ static void shape_rows() {
    SPECENGINE_SHARED(int, path, kMaxNodes);
    SPECENGINE_SHARED(unsigned, path_bits, kPathBits / 32);
    NodeState& s = node_state();
    __syncthreads();
    for (int i = threadIdx.x; i < kPathBits / 32; i += blockDim.x) path_bits[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
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
        state().op.place(row, static_cast<Side>(i), index, i == 0 ? 0 : state().op.logits.draft_rows[index]);
        const SideNotes& notes = now().sides[i];
        row.keep_all();
        row.temperature = 0, s.rows[2 + i] = row, row.temperature = s.shape.temperature;
        if (now().noted) row.top = notes.top;
        if (s.filters) {
          row.filtered = true, row.threshold = notes.threshold, row.last = notes.last, row.min_p = s.min_p;
        }
        s.rows[i] = row;
      }
    }
    __syncthreads();
  }
};

}  // namespace specengine
