// Notes on every row that a rule may visit, of the target in blocks (row, part, 0), of the drafter in (row, part, 1).
// A node without children needs none: the walk ends there, with a draw. Launches:
//
// mark: A few blocks own a request: they make its counts and biases dense in the workspaces, as for rule `match`.
//
// tops: A block owns a part of a row and finds its two largest scores.
//
// filter: A block owns a row with top-k, top-p or min-p and finds which of its tokens they keep.
//
// sums: A block owns a part of a row: it adds up weights and draws the target's token. Sums are of integers, and noise
// is keyed by tokens: neither depends on the parts.
//
// merge: A block owns a node: it merges the parts, and weighs the tokens of its children.
//
// Floor: the logits of target and drafter twice. A part of a row comes from L2 the second time, if all rows fit there.
#include "cuda/sampling/note_rows.cuh"

#include <algorithm>

#include "cuda/base/arch.cuh"
#include "cuda/sampling/filters.cuh"

namespace specengine {
namespace {

static_assert(kFilterThreads >= kMaxNodes, "a thread reads one node above a row");

__device__ Side side_of_block() { return blockIdx.z == 1 ? Side::kDraft : Side::kTarget; }

// Whether the block's node has children. For whole blocks.
__device__ bool has_children(const RuleRows& op, int b) {
  const int first = op.row_start[b], node = static_cast<int>(blockIdx.x) - first, thread = threadIdx.x;
  return __syncthreads_or(thread > node && thread < op.nodes(b) && op.parents[first + thread] == node);
}

// The block's request and row; -1 where there is none to note.
__device__ int find_row(const RuleRows& op, Side side, Row* row) {
  const int b = request_of_row(op), index = blockIdx.x;
  if (b < 0) return -1;
  const bool drafted = op.has_draft(index);
  if (side == Side::kDraft && !drafted) return -1;
  if (!op.all_nodes && !drafted && !op.table.filters(b) && !has_children(op, b)) return -1;
  *row = row_of(op, b);
  op.place(*row, side, index, drafted ? op.logits.draft_rows[index] : 0);
  return b;
}

// A row's two largest scores before temperature and filters, ties to the lower token. first without a token: the row is
// no distribution.
struct TopTwo {
  Candidate first, second;
};

__device__ TopTwo top_two(const RowPart* notes, int parts) {
  TopTwo top{nothing(), nothing()};
  for (int i = 0; i < parts; ++i) top.first = better(top.first, {notes[i].best, notes[i].best_token});
  for (int i = 0; i < parts; ++i) {
    const RowPart& part = notes[i];
    const bool taken = part.best_token == top.first.token;
    const Candidate other{taken ? part.second : part.best, taken ? part.second_token : part.best_token};
    if (other.token != kNoToken) top.second = better(top.second, other);
  }
  return top;
}

// The largest score as temperature makes it; false if that is no number.
__device__ bool temper(const TopTwo& top, float temperature, float* score) {
  if (top.first.token == kNoToken) return false;
  *score = static_cast<float>(top.first.value);
  if (temperature != 0.0f) *score /= temperature;
  return *score > -INFINITY && *score < INFINITY;
}

__device__ void keep(Row& row, const SideNotes& notes, float min_p) {
  row.filtered = true, row.threshold = notes.threshold, row.last = notes.last, row.min_p = min_p;
}

__global__ void __launch_bounds__(kNoteThreads) mark_rows_kernel(RuleRows op) {
  wait_for_previous_kernel();
  op.mark();
}

__global__ void __launch_bounds__(kNoteThreads) tops_kernel(RuleRows op) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(Candidate, scratch, kWarp);
  Row row;
  if (find_row(op, side_of_block(), &row) < 0) return;
  row.temperature = 0;
  const Part part = part_of_groups(row.vocab, blockIdx.y, gridDim.y);
  float most = -INFINITY, next = -INFINITY;
  int token = kNoToken, next_token = kNoToken;
  bool sane = true;
  row.for_each(part.begin, part.end, [&](float score, int v) {
    sane = sane && score < INFINITY;
    if (score > most) {
      next = most, next_token = token, most = score, token = v;
    } else if (score > next) {
      next = score, next_token = v;
    }
  });
  const Candidate first = block_best(sane ? Candidate{most, token} : no_distribution(), scratch);
  const bool taken = token == first.token;
  const Candidate second = block_best(taken ? Candidate{next, next_token} : Candidate{most, token}, scratch);
  if (threadIdx.x != 0) return;
  RowPart& notes = op.notes[blockIdx.x].parts[blockIdx.z][blockIdx.y];
  notes.best = static_cast<float>(first.value), notes.best_token = static_cast<int>(first.token);
  notes.second = static_cast<float>(second.value), notes.second_token = static_cast<int>(second.token);
}

__global__ void __launch_bounds__(kFilterThreads, 1) filter_rows_kernel(RuleRows op, int parts) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(unsigned, low, kBins);
  SPECENGINE_SHARED(unsigned, high, kBins);
  SPECENGINE_SHARED(uint64_t, sums, kWarp);
  SPECENGINE_SHARED(uint64_t, found, 3);
  const int owner = request_of_row(op);
  if (owner < 0 || !op.table.filters(owner)) return;
  Row row;
  const int b = find_row(op, side_of_block(), &row);
  if (b < 0) return;
  RowNotes& notes = op.notes[blockIdx.x];
  if (!temper(top_two(notes.parts[blockIdx.z], parts), row.temperature, &row.top)) return;
  shrink(row, op.table.top_k[b], op.table.top_p[b], op.table.min_p[b], {low, high, sums, found});
  if (threadIdx.x != 0) return;
  SideNotes& mine = notes.node.sides[blockIdx.z];
  mine.threshold = row.threshold, mine.last = row.last;
}

__global__ void __launch_bounds__(kNoteThreads, 2) sums_kernel(RuleRows op, int parts) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(Candidate, scratch, kWarp);
  SPECENGINE_SHARED(uint64_t, totals, kWarp);
  const Side side = side_of_block();
  Row row;
  const int b = find_row(op, side, &row);
  if (b < 0) return;
  RowNotes& notes = op.notes[blockIdx.x];
  const TopTwo tops = top_two(notes.parts[blockIdx.z], parts);
  float top;
  if (!temper(tops, row.temperature, &top)) return;
  const Part part = part_of_groups(row.vocab, blockIdx.y, gridDim.y);
  const uint32_t* mask = side == Side::kDraft ? op.masks.row(blockIdx.x) : nullptr;
  const bool greedy = row.temperature == 0.0f;
  uint64_t untempered_total = 0, total = 0, moment = 0;
  Candidate chosen = nothing();
  if (op.needs.untempered) {
    const float highest = static_cast<float>(tops.first.value);
    untempered(row).for_each(part.begin, part.end, [&](float score, int v) {
      if (v >= row.vocab || !is_allowed(mask, v)) return;
      const uint64_t weight = weight_of(score, highest);
      untempered_total += weight;
      if (mask != nullptr && static_cast<double>(weight) > chosen.value) chosen = {static_cast<double>(weight), v};
    });
    untempered_total = block_reduce<Sum>(untempered_total, totals);
    if (mask != nullptr) chosen = block_best(chosen, scratch);
  }
  row.top = top;
  if (op.table.filters(b)) keep(row, notes.node.sides[blockIdx.z], op.table.min_p[b]);
  if (op.needs.weights && !greedy) {
    row.for_each(part.begin, part.end, [&](float score, int v) {
      if (mask != nullptr && (v >= row.vocab || !is_allowed(mask, v))) return;
      const float weight = exp_polynomial<OneLane>(score - top);
      total += fixed_point(weight);
      if (op.needs.entropy && weight > 0) moment += fixed_point(weight * (top - score));
    });
    total = block_reduce<Sum>(total, totals);
    if (op.needs.entropy) moment = block_reduce<Sum>(moment, totals);
  }
  if (op.needs.drawn && side == Side::kTarget && !greedy) {
    const Candidate block = best_in_part(row, part.begin, part.end, scratch);
    chosen = {block.value, token_in_block(row, block, scratch)};
  }
  if (threadIdx.x != 0) return;
  RowPart& mine = notes.parts[blockIdx.z][blockIdx.y];
  mine.untempered_total = untempered_total, mine.total = total, mine.moment = moment, mine.chosen = chosen;
}

// Merges the parts of a side; one thread.
__device__ void merge_parts(const RuleRows& op, RowNotes& notes, Side side, int parts, const Row& row,
                            const uint32_t* mask) {
  const RowPart* part = notes.parts[static_cast<int>(side)];
  SideNotes& mine = notes.node.sides[static_cast<int>(side)];
  const TopTwo tops = top_two(part, parts);
  const int top_token = static_cast<int>(tops.first.token);
  const bool greedy = row.temperature == 0.0f;
  float top = 0;
  const bool sound = temper(tops, row.temperature, &top);
  uint64_t total = 0, untempered_total = 0, moment = 0;
  Candidate chosen = nothing();
  for (int i = 0; i < parts && sound; ++i) {
    total += part[i].total, untempered_total += part[i].untempered_total, moment += part[i].moment;
    chosen = better(chosen, part[i].chosen);
  }
  if (greedy && sound) total = is_allowed(mask, top_token) ? fixed_point(1.0f) : 0;
  mine.total = total, mine.untempered_total = untempered_total, mine.sound = sound;
  mine.best = static_cast<float>(tops.first.value), mine.top = top, mine.top_token = top_token;
  NodeNotes& node = notes.node;
  if (side == Side::kTarget) {
    node.moment = moment, node.drawn = greedy ? top_token : static_cast<int>(chosen.token);
    node.second_token = tops.second.token == kNoToken ? 0 : static_cast<int>(tops.second.token);
    node.second = tops.second.token == kNoToken ? 0 : static_cast<float>(tops.second.value);
  } else {
    node.has_draft = total > 0 && (!op.needs.untempered || untempered_total > 0);
    const bool allowed = !sound || is_allowed(mask, top_token);
    node.draft_top_token = allowed ? top_token : static_cast<int>(chosen.token);
    node.draft_top_weight = allowed ? fixed_point(1.0f) : chosen.value > 0 ? static_cast<uint64_t>(chosen.value) : 0;
  }
}

// Rows as the notes on them say, and the weights of single tokens.
struct NotedRow {
  Row row;
  const SideNotes& notes;
  const uint32_t* mask;  // of the drafter's row

  __device__ NotedRow(const RuleRows& op, const Row& shape, Side side, int b, const RowNotes& of_row)
      : row(shape), notes(of_row.node.sides[static_cast<int>(side)]), mask(nullptr) {
    const int index = blockIdx.x;
    op.place(row, side, index, side == Side::kDraft ? op.logits.draft_rows[index] : 0);
    if (side == Side::kDraft) mask = op.masks.row(index);
    row.top = notes.top;
    if (op.table.filters(b)) keep(row, notes, op.table.min_p[b]);
  }
  __device__ uint64_t weight(int token) const {
    if (!is_allowed(mask, token)) return 0;
    if (row.temperature == 0.0f) return token == notes.top_token ? fixed_point(1.0f) : 0;
    return weight_of(row.score(token), notes.top);
  }
  __device__ uint64_t untempered_weight(int token) const {
    return is_allowed(mask, token) ? weight_of(untempered(row).score(token), notes.best) : 0;
  }
  __device__ bool allows(int token) const { return row.temperature == 0.0f || row.score(token) > -INFINITY; }
};

__global__ void __launch_bounds__(kNoteThreads, 2) merge_kernel(RuleRows op, int parts) {
  wait_for_previous_kernel();
  const int b = request_of_row(op), index = blockIdx.x;
  if (b < 0) return;
  RowNotes& notes = op.notes[index];
  Row shape;
  const bool drafted = op.has_draft(index);
  if (find_row(op, Side::kTarget, &shape) < 0) {
    if (threadIdx.x == 0) notes.node.noted = 0, notes.node.has_draft = 0;
    return;
  }
  if (threadIdx.x == 0) {
    notes.node.noted = 1;
    if (!drafted) notes.node.has_draft = 0, notes.node.sides[1].sound = 1;
  }
  if (threadIdx.x == 0) merge_parts(op, notes, Side::kTarget, parts, shape, nullptr);
  if (threadIdx.x == kWarp && drafted) merge_parts(op, notes, Side::kDraft, parts, shape, op.masks.row(index));
  __syncthreads();
  if (!notes.node.sides[0].sound || !notes.node.sides[1].sound) return;

  const int first = op.row_start[b], node = index - first, child = threadIdx.x;
  const bool is_child =
      child > node && child < op.nodes(b) && op.parents[first + child] == node && op.tokens[first + child] != kNoToken;
#pragma unroll 1
  for (int i = 0; i < (drafted ? 2 : 1); ++i) {
    const NotedRow row(op, shape, static_cast<Side>(i), b, notes);
    if (is_child && op.needs.weights) {
      const int token = op.tokens[first + child];
      SideNotes& mine = op.notes[first + child].node.sides[i];
      mine.weight = row.weight(token);
      if (op.needs.untempered) mine.untempered_weight = row.untempered_weight(token);
    }
    if (i == 0 && child == 0) {
      const int second = notes.node.second_token;
      if (op.needs.leaders) {
        notes.node.allowed = (row.allows(notes.node.sides[0].top_token) ? 1 : 0) | (row.allows(second) ? 2 : 0);
      }
      if (op.needs.untempered && drafted && notes.node.has_draft) {
        notes.node.target_at_draft_top = row.untempered_weight(notes.node.draft_top_token);
      }
    }
  }
}

}  // namespace

int note_rows(const NoteRows& op) {
  const Needs& needs = op.rows.needs;
  const unsigned sides = needs.draft && op.rows.logits.draft != nullptr ? 2 : 1;
  const auto M = static_cast<unsigned>(op.count);
  const int64_t groups = (op.rows.table.vocab + kGroups - 1) / kGroups, blocks = 4 * multiprocessors(op.device);
  const auto parts =
      static_cast<unsigned>(std::clamp<int64_t>(blocks / (op.count * sides), 1, std::min<int64_t>(groups, kMaxParts)));
  const auto shares = static_cast<unsigned>(std::clamp<int64_t>(op.history / 2048, 1, 32));
  const auto run = [&](dim3 grid, int threads, auto kernel, auto... more) {
    launch({"verify_tree", grid, dim3(static_cast<unsigned>(threads)), 0, op.stream}, kernel, op.rows, more...);
  };
  const int count = static_cast<int>(parts);
  run(dim3(static_cast<unsigned>(op.requests), shares), kNoteThreads, mark_rows_kernel);
  run(dim3(M, parts, sides), kNoteThreads, tops_kernel);
  run(dim3(M, 1, sides), kFilterThreads, filter_rows_kernel, count);
  run(dim3(M, parts, sides), kNoteThreads, sums_kernel, count);
  run(dim3(M), kNoteThreads, merge_kernel, count);
  return count;
}

}  // namespace specengine
