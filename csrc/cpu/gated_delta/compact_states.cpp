// Replays the accepted paths on the committed states: the same steps on the same numbers as in the pass.
#include <algorithm>
#include <vector>

#include "cpu/gated_delta/delta_step.h"
#include "cpu/parallel_for.h"
#include "ops/gated_delta/gated_delta.h"

namespace specengine::SPECENGINE_ISA {
namespace {

void check_paths(const CompactStates& op) {
  const int32_t* start = op.row_start.as<int32_t>();
  const int64_t B = op.row_start.shape[0] - 1, N = op.path.shape[1];
  if (start[0] != 0 || start[B] != op.states.records.shape[1]) {
    fail("row_start: expected to run from 0 to ", op.states.records.shape[1]);
  }
  for (int64_t b = 0; b < B; ++b) {
    const int32_t* path = op.path.as<int32_t>() + b * N;
    const int64_t count = op.path_length.as<int32_t>()[b], nodes = start[b + 1] - start[b];
    if (count < 0 || count > std::min(N, nodes)) {
      fail("path_length: entry ", b, " is ", count, ", expected 0 to ", std::min(N, nodes));
    }
    for (int64_t j = 0; j < count; ++j) {
      if (path[j] < j || path[j] >= nodes || (j > 0 && path[j] <= path[j - 1])) {
        fail("path: entry [", b, ", ", j, "] is ", path[j], ", expected ascending node indices below ", nodes);
      }
    }
  }
  op.states.validate_slots();
}

void replay(const CompactStates& op, int64_t layer, int64_t b, int64_t head) {
  const DeltaStates& all = op.states;
  const int64_t Hv = all.states.shape[2], Dk = all.states.shape[3], Dv = all.states.shape[4], C = all.conv.shape[3];
  const int64_t keys = op.key_heads * Dk, key = (op.tiled ? head % op.key_heads : head / (Hv / op.key_heads)) * Dk;
  const int32_t* path = op.path.as<int32_t>() + b * op.path.shape[1];
  const int64_t count = op.path_length.as<int32_t>()[b], first_row = op.row_start.as<int32_t>()[b];
  thread_local std::vector<float> block;
  if (static_cast<int64_t>(block.size()) < Dk * kColumns) block.resize(Dk * kColumns);
  float* const state = all.state(b, layer, head);
  for (int64_t first = 0; first < Dv; first += kColumns) {
    load_columns(state, Dk, Dv, first, block.data());
    for (int64_t j = 0; j < count; ++j) {
      const float* activated = all.record(layer, first_row + path[j]) + C;
      const float* gates = activated + C;
      const DeltaToken token{activated + keys + key, nullptr, gates[head], gates[Hv + head]};
      const f32x16 v = load_values(activated + 2 * keys + head * Dv, Dv, first);
      delta_step(block.data(), block.data(), token, v, Dk);
    }
    store_columns(block.data(), Dk, Dv, first, state);
  }
}

void keep_inputs(const CompactStates& op, int64_t layer, int64_t b) {
  const int64_t C = op.states.conv.shape[3], kept = kConvWidth - 1;
  const int32_t* path = op.path.as<int32_t>() + b * op.path.shape[1];
  const int64_t count = op.path_length.as<int32_t>()[b], first_row = op.row_start.as<int32_t>()[b];
  float* inputs = op.states.conv_inputs(b, layer);
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t from = i + count - kept;
    const float* input = from < 0 ? inputs + (i + count) * C : op.states.record(layer, first_row + path[from]);
    std::copy_n(input, C, inputs + i * C);
  }
}

}  // namespace

void run(const CompactStates& op) {
  check_paths(op);
  const int64_t B = op.row_start.shape[0] - 1, L = op.states.layers(), Hv = op.states.states.shape[2];
  parallel_for(L * B * Hv, [&](int64_t task) {
    const int64_t b = task / Hv % B, layer = task / Hv / B;
    if (op.path_length.as<int32_t>()[b] > 0) replay(op, layer, b, task % Hv);
  });
  for (int64_t i = 0; i < L * B; ++i) keep_inputs(op, i / B, i % B);
}

}  // namespace specengine::SPECENGINE_ISA
