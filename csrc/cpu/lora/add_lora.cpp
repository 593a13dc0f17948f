// Adapters beside the weights. The rows of one adapter are gathered into tiles, so that a pass reads its A and B once
// for all of them. Two loops: tasks of A by chunks of columns, then tasks of B by panels of output columns.
#include <cstring>

#include "cpu/lora/plan.h"
#include "cpu/parallel_for.h"
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

// Bytes by which the prefetch runs ahead in each part of a chunk. The hardware's own begins anew in every part; more
// bytes would be fetched in vain behind the last one.
constexpr int64_t kAhead = 1024;
constexpr int kRows = 6;  // of a tile: 12 sums, 2 weights, 1 broadcast are all vector registers of AVX2
constexpr int64_t kPart = kLoraChunk / 4;  // columns of a chain; a row alone interleaves the four of a chunk

// One row's chunk of A x: its chains wait for no other's multiply-adds. The same sums as by parts().
template <typename Weight>
void whole_chunk(const float* x, const Weight* panel, float* out) {
  f32x16 sum[4] = {};
  for (int64_t c = 0; c < kPart; ++c) {
    for (int i = 0; i < 4; ++i) {
      const int64_t column = i * kPart + c;
      __builtin_prefetch(panel + column * kPanel + kAhead / sizeof(Weight));
      sum[i] = fmadd(splat16(x[column]), load16(panel + column * kPanel), sum[i]);
    }
  }
  store16(out, add16(add16(add16(sum[0], sum[1]), sum[2]), sum[3]));
}

// sum[r] = x[r][0, columns) . panel[columns][16], each lane one chain.
template <typename Weight, int R>
void chains(const float* const* x, const Weight* panel, int64_t columns, float (*out)[kPanel]) {
  f32x16 sum[R] = {};
  for (int64_t c = 0; c < columns; ++c) {
    const f32x16 w = load16(panel + c * kPanel);
    for (int r = 0; r < R; ++r) sum[r] = fmadd(splat16(x[r][c]), w, sum[r]);
  }
  for (int r = 0; r < R; ++r) store16(out[r], sum[r]);
}

template <typename Weight, int R = kRows>
void run_chains(int64_t count, const float* const* x, const Weight* panel, int64_t columns, float (*out)[kPanel]) {
  if (count == R) return chains<Weight, R>(x, panel, columns, out);
  if constexpr (R > 1) run_chains<Weight, R - 1>(count, x, panel, columns, out);
}

// One row by P panels of `rank` columns each, one `stride` apart: their chains wait for no other's multiply-adds. The
// same sums as by chains().
template <typename Weight, int P>
void side_by_side(const float* x, const Weight* panel, int64_t rank, int64_t stride, float (*out)[kPanel]) {
  f32x16 sum[P] = {};
  for (int64_t c = 0; c < rank; ++c) {
    const f32x16 value = splat16(x[c]);
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(panel + (P + p) * stride + c * kPanel);  // of the next panels
      sum[p] = fmadd(value, load16(panel + p * stride + c * kPanel), sum[p]);
    }
  }
  for (int p = 0; p < P; ++p) store16(out[p], sum[p]);
}

template <typename Weight, int P = kPanelsOfTask>
void run_side_by_side(int64_t count, const float* x, const Weight* panel, int64_t rank, int64_t stride,
                      float (*out)[kPanel]) {
  if (count == P) return side_by_side<Weight, P>(x, panel, rank, stride, out);
  if constexpr (P > 1) run_side_by_side<Weight, P - 1>(count, x, panel, rank, stride, out);
}

// A chunk of A x for some rows: the sums of its parts, added in order.
template <typename Weight>
void parts(int64_t count, const float* const* x, const Weight* panel, int64_t columns, float (*out)[kPanel]) {
  run_chains(count, x, panel, std::min(kPart, columns), out);
  for (int64_t first = kPart; first < columns; first += kPart) {
    const float* rest[kRows];
    for (int64_t r = 0; r < count; ++r) rest[r] = x[r] + first;
    float part[kRows][kPanel];
    run_chains(count, rest, panel + first * kPanel, std::min(kPart, columns - first), part);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < kPanel; ++i) out[r][i] += part[r][i];
    }
  }
}

// Calls body(rows, count) for tiles of a group's rows.
template <typename Body>
void for_tiles(const Plan& plan, const Group& group, const Body& body) {
  for (int64_t at = group.begin; at < group.end; at += kRows) {
    body(plan.rows.data() + at, std::min<int64_t>(kRows, group.end - at));
  }
}

int64_t panels_of_rank(const LoraModule& module, int32_t adapter) {
  return (module.ranks.as<int32_t>()[adapter] + kPanel - 1) / kPanel;
}

// Fetches a share of B, which the next tasks read, while the sums of A x wait for each other.
template <typename Weight>
void fetch_b(const Task& task) {
  const LoraModule& module = *task.module;
  const int64_t bytes = module.panels() * module.rank() * kPanel * static_cast<int64_t>(sizeof(Weight));
  const int64_t chunk = task.first / kLoraChunk, chunks = module.chunks();
  const uint8_t* b = module.b.as<uint8_t>() + task.group->adapter * bytes;
  for (int64_t at = bytes * chunk / chunks; at < bytes * (chunk + 1) / chunks; at += 64)
    __builtin_prefetch(b + at, 0, 2);
}

// One chunk of columns of A x.
template <typename Weight>
void shrink(const AddLora& op, const Plan& plan, const Task& task) {
  const LoraModule& module = *task.module;
  const int64_t K = module.columns(), R = module.rank(), chunks = module.chunks();
  const Weight* a = module.a.as<Weight>() + task.group->adapter * R * K + task.first * kPanel;
  fetch_b<Weight>(task);
  for_tiles(plan, *task.group, [&](const int64_t* rows, int64_t count) {
    const float* x[kRows];
    for (int64_t r = 0; r < count; ++r) x[r] = op.x.as<float>() + rows[r] * K + task.first;
    for (int64_t p = 0; p < panels_of_rank(module, task.group->adapter); ++p) {
      float out[kRows][kPanel];
      if (count == 1 && task.count == kLoraChunk) {
        whole_chunk(x[0], a + p * K * kPanel, out[0]);
      } else {
        parts(count, x, a + p * K * kPanel, task.count, out);
      }
      for (int64_t r = 0; r < count; ++r) {
        float* to = task.sums + (rows[r] * chunks + task.first / kLoraChunk) * R + p * kPanel;
        std::memcpy(to, out[r], sizeof(out[r]));
      }
    }
  });
}

// Some panels of B (A x), added to the output.
template <typename Weight>
void expand(const AddLora& op, const Plan& plan, const Task& task) {
  const LoraModule& module = *task.module;
  const int32_t adapter = task.group->adapter, rank = module.ranks.as<int32_t>()[adapter];
  const int64_t R = module.rank(), chunks = module.chunks(), N = op.out.shape[1];
  const float scale = module.scales.as<float>()[adapter];
  const Weight* b = module.b.as<Weight>() + (adapter * module.panels()) * R * kPanel;
  for_tiles(plan, *task.group, [&](const int64_t* rows, int64_t count) {
    float scaled[kRows][kMostLoraRank];
    const float* x[kRows];
    for (int64_t r = 0; r < count; ++r) {
      const float* sums = task.sums + rows[r] * chunks * R;
      for (int64_t i = 0; i < panels_of_rank(module, adapter) * kPanel; i += kPanel) {
        f32x8 low = load8(sums + i), high = load8(sums + i + kLanes);
        for (int64_t c = 1; c < chunks; ++c) {
          low += load8(sums + c * R + i), high += load8(sums + c * R + i + kLanes);
        }
        store8(scaled[r] + i, low * splat(scale)), store8(scaled[r] + i + kLanes, high * splat(scale));
      }
      x[r] = scaled[r];
    }
    const auto add = [&](int64_t row, int64_t p, const float* sum) {
      float* to = op.out.as<float>() + row * N + module.first + p * kPanel;
      const int64_t columns = std::min(kPanel, module.rows - p * kPanel);
      if (columns == kPanel) return store16(to, add16(load16(to), load16(sum)));
      for (int64_t i = 0; i < columns; ++i) to[i] += sum[i];
    };
    if (count == 1) {
      float out[kPanelsOfTask][kPanel];
      for (int64_t p = task.first; p < task.first + task.count; p += kPanelsOfTask) {
        const int64_t panels = std::min(kPanelsOfTask, task.first + task.count - p);
        run_side_by_side(panels, x[0], b + p * R * kPanel, rank, R * kPanel, out);
        for (int64_t i = 0; i < panels; ++i) add(rows[0], p + i, out[i]);
      }
      return;
    }
    for (int64_t p = task.first; p < task.first + task.count; ++p) {
      float out[kRows][kPanel];
      run_chains(count, x, b + p * R * kPanel, rank, out);
      for (int64_t r = 0; r < count; ++r) add(rows[r], p, out[r]);
    }
  });
}

// Of this thread's op; it keeps its memory from call to call.
thread_local Plan current;

// The parts of a call that other threads run too.
struct Call {
  const AddLora* op;
  const Plan* plan;
};
thread_local Call started;

void make_plan(const AddLora& op) {
  op.check_values();
  current.make(op);
  started = {&op, &current};
}

template <typename Body>
void with_weight(const AddLora& op, const Body& body) {
  with_float_type(op.projection->modules[0].a.dtype, body);
}

void run_shrink(void* context, int64_t i) {
  const Call& call = *static_cast<const Call*>(context);
  with_weight(*call.op, [&](auto zero) { shrink<decltype(zero)>(*call.op, *call.plan, call.plan->shrink[i]); });
}

void run_expand(const Call& call) {
  with_weight(*call.op, [&](auto zero) {
    parallel_for(static_cast<int64_t>(call.plan->expand.size()),
                 [&](int64_t i) { expand<decltype(zero)>(*call.op, *call.plan, call.plan->expand[i]); });
  });
}

}  // namespace

void run(const AddLora& op) {
  if (op.projection->modules.empty()) return;
  make_plan(op);
  run_parallel(static_cast<int64_t>(current.shrink.size()), run_shrink, &started);
  run_expand(started);
}

void run(const StartLora& half) {
  if (half.op->projection->modules.empty()) return;
  make_plan(*half.op);
  run_beside_next(static_cast<int64_t>(current.shrink.size()), run_shrink, &started);
}

void run(const FinishLora& half) {
  if (!half.op->projection->modules.empty()) run_expand(started);
}

}  // namespace specengine::SPECENGINE_ISA
