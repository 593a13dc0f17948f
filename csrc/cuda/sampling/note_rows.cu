// Notes on every row before a rule walks the tree, of the target in blocks (row, part, 0), of the drafter in (row,
// part, 1). Four launches:
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
// Floor: the logits of target and drafter twice. A part of a row comes from L2 the second time, if all rows fit there.
#include "cuda/sampling/note_rows.cuh"

#include <algorithm>

#include "cuda/base/arch.cuh"
#include "cuda/sampling/filters.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads >= kMaxNodes && kFilterThreads >= kMaxNodes, "a thread reads one node above a row");

__device__ bool of_draft() { return blockIdx.z == 1; }
__device__ RowNotes& notes_of(const NoteRows& op) {
  return op.notes[2 * static_cast<int64_t>(blockIdx.x) + blockIdx.z];
}

// The block's request and row; -1 where there is none.
__device__ int find_row(const NoteRows& op, Row* row) {
  const int b = request_of_row(op), index = blockIdx.x;
  if (b < 0) return -1;
  const LogitRows& logits = op.logits;
  if (of_draft() && logits.draft_rows[index] < 0) return -1;
  *row = row_of(op, b);
  if (of_draft()) {
    row->logits = logits.draft + logits.draft_rows[index] * logits.columns, row->index = logits.draft_index;
    row->aligned = op.aligned && row->index == nullptr;
  } else {
    row->logits = logits.target + index * logits.vocab, row->mask = op.masks.row(index);
  }
  return b;
}

__global__ void __launch_bounds__(kThreads) mark_rows_kernel(NoteRows op) {
  wait_for_previous_kernel();
  op.mark();
}

__global__ void __launch_bounds__(kThreads) tops_kernel(NoteRows op) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(Candidate, scratch, kWarp);
  Row row;
  if (find_row(op, &row) < 0) return;
  row.temperature = 0;
  const Part part = part_of(row);
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
  RowPart& notes = notes_of(op).parts[blockIdx.y];
  notes.best = static_cast<float>(first.value), notes.best_token = static_cast<int>(first.token);
  notes.second = static_cast<float>(second.value), notes.second_token = static_cast<int>(second.token);
}

__global__ void __launch_bounds__(kFilterThreads, 1) filter_rows_kernel(NoteRows op, int parts) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(unsigned, low, kBins);
  SPECENGINE_SHARED(unsigned, high, kBins);
  SPECENGINE_SHARED(uint64_t, sums, kWarp);
  SPECENGINE_SHARED(uint64_t, found, 3);
  Row row;
  const int b = find_row(op, &row);
  if (b < 0 || !op.table.filters(b)) return;
  RowNotes& notes = notes_of(op);
  if (!temper(top_two(notes, parts), row.temperature, &row.top)) return;
  shrink(row, op.table.top_k[b], op.table.top_p[b], op.table.min_p[b], {low, high, sums, found});
  if (threadIdx.x == 0) notes.threshold = row.threshold, notes.last = row.last;
}

__global__ void __launch_bounds__(kThreads) sums_kernel(NoteRows op, int parts) {
  wait_for_previous_kernel();
  SPECENGINE_SHARED(Candidate, scratch, kWarp);
  SPECENGINE_SHARED(uint64_t, totals, kWarp);
  Row row;
  const int b = find_row(op, &row);
  if (b < 0) return;
  RowNotes& notes = notes_of(op);
  const TopTwo tops = top_two(notes, parts);
  float top;
  if (!temper(tops, row.temperature, &top)) return;
  const Part part = part_of(row);
  uint64_t untempered_total = 0, total = 0, moment = 0;
  Candidate drawn = nothing();
  if (op.needs.untempered) {
    Row plain = row;
    plain.temperature = 0;
    const float highest = static_cast<float>(tops.first.value);
    plain.for_each(part.begin, part.end, [&](float score, int) { untempered_total += weight_of(score, highest); });
    untempered_total = block_reduce<Sum>(untempered_total, totals);
  }
  row.top = top;
  if (op.table.filters(b)) {
    row.filtered = true;
    row.threshold = notes.threshold, row.last = notes.last, row.min_p = op.table.min_p[b];
  }
  if (op.needs.weights && row.temperature != 0.0f) {
    row.for_each(part.begin, part.end, [&](float score, int) {
      const float weight = exp_polynomial<OneLane>(score - top);
      total += fixed_point(weight);
      if (weight > 0) moment += fixed_point(weight * (top - score));
    });
    total = block_reduce<Sum>(total, totals), moment = block_reduce<Sum>(moment, totals);
  }
  if (!of_draft() && row.temperature != 0.0f) drawn = draw(row, part.begin, part.end, scratch);
  if (threadIdx.x != 0) return;
  RowPart& mine = notes.parts[blockIdx.y];
  mine.untempered_total = untempered_total, mine.total = total, mine.moment = moment, mine.drawn = drawn;
}

}  // namespace

int note_rows(const NoteRows& op, int64_t rows, int64_t requests, int64_t history, int device, void* stream) {
  const unsigned sides = op.needs.draft && op.logits.draft != nullptr ? 2 : 1;
  const auto M = static_cast<unsigned>(rows);
  const int64_t strips = (op.table.vocab + kStrip - 1) / kStrip, blocks = 4 * multiprocessors(device);
  const auto parts =
      static_cast<unsigned>(std::clamp<int64_t>(blocks / (rows * sides), 1, std::min<int64_t>(strips, kMaxParts)));
  const auto shares = static_cast<unsigned>(std::clamp<int64_t>(history / 2048, 1, 32));
  const auto run = [&](dim3 grid, int threads, auto kernel, auto... more) {
    launch({"verify_tree", grid, dim3(static_cast<unsigned>(threads)), 0, stream}, kernel, op, more...);
  };
  run(dim3(static_cast<unsigned>(requests), shares), kThreads, mark_rows_kernel);
  run(dim3(M, parts, sides), kThreads, tops_kernel);
  run(dim3(M, 1, sides), kFilterThreads, filter_rows_kernel, static_cast<int>(parts));
  run(dim3(M, parts, sides), kThreads, sums_kernel, static_cast<int>(parts));
  return static_cast<int>(parts);
}

}  // namespace specengine
