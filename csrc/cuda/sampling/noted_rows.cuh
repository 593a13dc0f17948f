// The rows of rules/rows.h for a walk that reads notes (note_rows.cu). All threads of a block run the rule and get the
// same answers.
//
// Only sums over the vocabulary and draws from it need a row (node_sums.cuh). Launch k of a walk repeats it up to its
// k-th such operation, with the results of the earlier ones, which earlier launches have left in a log by parts of the
// row. The blocks of a request share that operation and stop. The last launch has a block per request, which does all
// that is left.
#pragma once
#include "cuda/sampling/node_sums.cuh"

namespace specengine {

class NotedRows : public DraftedTree, protected WeightArithmetic {
 public:
  // Behind NodeState::begin and a barrier.
  __device__ explicit NotedRows(const DraftedTree& tree) : DraftedTree(tree) {}

  __device__ bool stopped() const { return state().stopped; }
  // Whether no further operation will be shared.
  __device__ bool ended() const { return !state().stopped || state().draws; }

  // As DraftedTree's, which look for children node by node.
  __device__ int first_child(int node) const { return state().first_child[node]; }
  __device__ int next_sibling(int node) const { return state().next_sibling[node]; }
  __device__ int child_with(int node, int wanted) const {
    int child = first_child(node);
    while (child >= 0 && tokens[child] != wanted) child = next_sibling(child);
    return child;
  }

  __device__ bool load(int node, const Needs&) {
    const NodeNotes& notes = state().notes[node];
    if (stopped() || (notes.noted && !(notes.sides[0].sound && notes.sides[1].sound))) return false;
    once([&](NodeState& s) {
      s.node = node, s.drawn = kNotDrawn, s.prepared = 0, s.changed = false;
      s.changes.mode = Mode::kNone, s.changes.count = 0;
      s.has_draft = notes.noted && notes.has_draft;
      s.target_total = s.processed_total = notes.sides[0].total, s.draft_total = notes.sides[1].total;
    });
    return true;
  }
  __device__ int loaded() const { return state().node; }

  __device__ int drawn() {
    if (now().noted && (greedy() || state().op.needs.drawn)) return now().drawn;
    if (state().drawn == kNotDrawn) {
      const int token = draw_token();
      once([&](NodeState& s) { s.drawn = token; });
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
  __device__ double processed_prob(int token) { return share(known(token).target, state().processed_total); }

  __device__ double target_prob(int token) {
    return share(state().changes.target(known(token), token), state().target_total);
  }
  __device__ bool has_draft() const { return state().has_draft; }
  __device__ double draft_prob(int token) {
    return has_draft() ? share(state().changes.draft(known(token).draft, token), state().draft_total) : 1.0;
  }
  __device__ bool changed() const { return state().changed; }
  __device__ int residual() { return changed() ? draw_token_by_weight() : drawn(); }

  __device__ double untempered_target_prob(int token) {
    const bool top = has_draft() && token == now().draft_top_token;
    return share(top ? now().target_at_draft_top : known(token).untempered_target, now().sides[0].untempered_total);
  }
  __device__ double untempered_draft_prob(int token) {
    return has_draft() ? share(known(token).untempered_draft, now().sides[1].untempered_total) : 1.0;
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
    const TokenWeights weights = known(refused);
    const uint64_t total = state().target_total;
    if (!has_draft()) {
      const uint64_t rest = total - state().changes.target(weights, refused);
      once([](NodeState& s) { s.changed = true; });
      if (rest == 0) return 0;
      set(refused, 0, rest);
      return scale * share(rest, total);
    }
    const double most = scale > 1 ? scale : 1.0;
    const uint64_t draft_weight = state().changes.draft(weights.draft, refused);
    const bool drops = !state().op.logits.replacement;
    const double target_scale = scale / most / static_cast<double>(total);
    const double draft_scale = 1.0 / most / static_cast<double>(state().draft_total);
    once([&](NodeState& s) {
      s.list[s.changes.count++] = {target_scale, draft_scale, 0, refused, true, drops, false};
      s.changed = true;
    });
    uint64_t mass = state().masses[child];
    if (mass == kUnknownMass) {
      mass = node_sum(RowSum::kTarget);
      once([&](NodeState& s) { s.masses[child] = mass; });
    }
    once([&](NodeState& s) {
      if (mass > 0) s.target_total = mass;
      s.list[s.changes.count - 1].takes = mass > 0;  // else the target stays as it was
      if (drops) s.draft_total -= draft_weight;
    });
    return static_cast<double>(mass) / kUnit * most;
  }

  __device__ void lower(int token, double by) {
    const uint64_t total = state().target_total, before = state().changes.target(known(token), token);
    const double left_over = share(before, total) - by;
    const uint64_t weight = left_over > 0 ? static_cast<uint64_t>(left_over * static_cast<double>(total)) : 0;
    if (total - before + weight != 0) set(token, weight, total - before + weight);
  }

  __device__ double distance() { return static_cast<double>(prepared_sum(RowSum::kDistance)) / kUnit; }
  __device__ void keep_draft() {
    once([](NodeState& s) { s.changes.mode = Mode::kKeepDraft, s.target_total = s.draft_total, s.changed = true; });
  }
  __device__ void mix(Side judge, double least) {
    once([&](NodeState& s) {
      s.changes.judge = judge, s.changes.least = least;
      s.changes.judge_total = s.now().sides[static_cast<int>(judge)].untempered_total;
    });
    const uint64_t trusted = prepared_sum(RowSum::kTrusted);
    if (trusted == 0) return;
    once([&](NodeState& s) {
      s.changes.mode = Mode::kMix, s.changed = true;
      s.changes.mix_scale = 1.0 / static_cast<double>(s.draft_total);
      s.changes.mix_rest = share(s.draft_total - trusted, s.draft_total) / static_cast<double>(s.target_total);
    });
    const uint64_t total = prepared_sum(RowSum::kTarget);
    once([&](NodeState& s) { s.target_total = total; });
  }

  __device__ void note(int node, double value, int mark) {
    once([&](NodeState& s) { s.values[node] = value, s.marks[node] = mark; });
  }
  __device__ double value(int node) const { return state().values[node]; }
  __device__ int mark(int node) const { return state().marks[node]; }

 private:
  __device__ static const NodeState& state() { return node_state(); }
  __device__ static const NodeNotes& now() { return node_state().now(); }

  __device__ static void set(int token, uint64_t weight, uint64_t total) {
    once([&](NodeState& s) {
      s.list[s.changes.count++] = {0, 0, weight, token, false, false, true};
      s.target_total = total, s.changed = true;
    });
  }

  // The weights of a child's token, which the notes have.
  __device__ TokenWeights known(int token) {
    if (parents[known_] != state().node || tokens[known_] != token) {
      known_ = max(child_with(state().node, token), 0);  // no child: only after a stop
    }
    const SideNotes *target = &state().notes[known_].sides[0], *draft = &state().notes[known_].sides[1];
    return {target->weight, draft->weight, target->untempered_weight, draft->untempered_weight};
  }

  // The next sum that depends on the loaded node alone; a launch before the walk may have prepared it.
  __device__ static uint64_t prepared_sum(RowSum kind) {
    const int slot = state().prepared;
    if (slot >= state().have_prepared) return node_sum(kind);
    once([&](NodeState& s) { s.prepared = slot + 1; });
    return state().prepared_sums[state().node * kMaxPrepared + slot];
  }

  int known_ = 0;  // a child, of which the rule has asked last
};

}  // namespace specengine
