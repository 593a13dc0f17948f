// A pass of one layer: first every row's convolution, norms and gates, then the states of each head along the trees.
#include "ops/gated_delta/gated_delta.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/gated_delta/delta_step.h"
#include "cpu/parallel_for.h"
#include "cpu/row_norm.h"
#include "ops/tree_attention.h"

namespace specengine::SPECENGINE_ISA {
namespace {

constexpr float kNormEps = 1e-6f;  // of q and k, fixed by the architecture

// The rows of one batch as trees. Every node's state is made in a buffer; a node takes its parent's buffer if no later
// node needs it, so that a chain stays in one.
class Trees {
 public:
  Trees(const TensorView& row_start, const OptionalTensor& ancestors, int64_t rows)
      : start_(row_start.as<int32_t>()), parent_(rows, -1), buffer_(rows, 0), from_(rows, 0) {
    for (int64_t b = 0; b + 1 < row_start.shape[0]; ++b) {
      for (int64_t m = start_[b]; m < start_[b + 1]; ++m) parent_[m] = parent_of(m, b, ancestors);
      place(b);
    }
  }

  int64_t first(int64_t b) const { return start_[b]; }
  int64_t last(int64_t b) const { return start_[b + 1]; }
  int64_t parent(int64_t row) const { return parent_[row]; }  // -1: the committed state
  int64_t from(int64_t row) const { return from_[row]; }      // buffer of the parent
  int64_t buffer(int64_t row) const { return buffer_[row]; }
  int64_t buffers() const { return buffers_; }

 private:
  int64_t parent_of(int64_t row, int64_t b, const OptionalTensor& ancestors) const {
    const int64_t node = row - start_[b];
    if (node == 0) return -1;
    if (!ancestors.defined()) return row - 1;
    const uint32_t* bits = ancestors.as<uint32_t>() + row * ancestors.shape[1];
    int64_t parent = node - 1;
    while (!(bits[parent / 32] >> (parent % 32) & 1)) --parent;  // the root is there
    return start_[b] + parent;
  }

  void place(int64_t b) {
    std::vector<int64_t> later(last(b) - first(b), 0);  // children of each node that have no buffer yet
    for (int64_t m = first(b); m < last(b); ++m) {
      if (parent_[m] >= 0) ++later[parent_[m] - first(b)];
    }
    std::vector<int64_t> unused;
    int64_t made = 1;  // buffer 0 begins with the committed state
    for (int64_t m = first(b); m < last(b); ++m) {
      const bool root = parent_[m] < 0;
      from_[m] = root ? 0 : buffer_[parent_[m]];
      if (root || --later[parent_[m] - first(b)] == 0) {
        buffer_[m] = from_[m];
      } else if (!unused.empty()) {
        buffer_[m] = unused.back();
        unused.pop_back();
      } else {
        buffer_[m] = made++;
      }
      if (later[m - first(b)] == 0) unused.push_back(buffer_[m]);
    }
    buffers_ = std::max(buffers_, made);
  }

  const int32_t* start_;
  std::vector<int64_t> parent_, buffer_, from_;
  int64_t buffers_ = 1;
};

f32x8 silu(f32x8 x) { return x / (splat(1.0f) + exp8(-x)); }
float silu(float x) { return x / (1.0f + exp1(-x)); }

// log(1 + exp(x))
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The convolution of a row with its ancestors' inputs, and SiLU.
void convolve(const float* const (&taps)[kConvWidth], const float* weights, int64_t channels, float* out) {
  for (int64_t c = 0; c < channels; ++c) {
    float sum = weights[c] * taps[0][c];
    for (int t = 1; t < kConvWidth; ++t) sum = fmadd(weights[t * channels + c], taps[t][c], sum);
    out[c] = sum;
  }
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) store8(out + c, silu(load8(out + c)));
  for (; c < channels; ++c) out[c] = silu(out[c]);
}

void normalise(float* head, int64_t dim, float factor) {
  const float scale = factor / std::sqrt(sum_of_squares(head, dim) + kNormEps);
  for (int64_t i = 0; i < dim; ++i) head[i] *= scale;
}

// Writes the record of a row: inputs of the convolution, its outputs with q and k of length 1, decays and rates.
void make_record(const GatedDelta& op, const Trees& trees, int64_t b, int64_t m) {
  const GatedDeltaLayer& layer = *op.layer;
  const int64_t C = layer.channels(), Hv = layer.value_heads(), Dk = layer.key_dim();
  const float* row = op.rows.as<float>() + m * layer.row_columns();
  float* record = op.states.record(op.number, m);
  std::copy_n(row, C, record);
  const float* taps[kConvWidth];
  int64_t ancestor = m;
  for (int64_t t = kConvWidth - 1, committed = kConvWidth - 2; t >= 0; --t) {
    if (ancestor < 0) {
      taps[t] = op.states.conv_inputs(b, op.number) + committed-- * C;
    } else {
      taps[t] = op.rows.as<float>() + ancestor * layer.row_columns();
      ancestor = trees.parent(ancestor);
    }
  }
  float* activated = record + C;
  convolve(taps, layer.conv.as<float>(), C, activated);
  const float query = 1.0f / std::sqrt(static_cast<float>(Dk));
  for (int64_t h = 0; h < layer.key_heads; ++h) {
    normalise(activated + h * Dk, Dk, query);
    normalise(activated + (layer.key_heads + h) * Dk, Dk, 1.0f);
  }
  const float *rate = row + C + layer.values(), *step = rate + Hv;
  float *decays = activated + C, *rates = decays + Hv;
  for (int64_t h = 0; h < Hv; ++h) {
    decays[h] = std::exp(layer.decay.as<float>()[h] * softplus(step[h] + layer.dt_bias.as<float>()[h]));
    rates[h] = 1.0f / (1.0f + exp1(-rate[h]));
  }
}

// Runs one head of one request down its tree; out becomes the nodes' outputs.
void run_head(const GatedDelta& op, const Trees& trees, int64_t b, int64_t head) {
  const GatedDeltaLayer& layer = *op.layer;
  const int64_t C = layer.channels(), Dk = layer.key_dim(), Dv = layer.value_dim(), Hv = layer.value_heads();
  const int64_t keys = layer.key_heads * Dk, key = layer.key_head(head) * Dk, floats = Dk * kColumns;
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < trees.buffers() * floats) memory.resize(trees.buffers() * floats);
  float* const buffers = memory.data();
  float* const state = op.states.state(b, op.number, head);
  for (int64_t first = 0; first < Dv; first += kColumns) {
    load_columns(state, Dk, Dv, first, buffers);
    for (int64_t m = trees.first(b); m < trees.last(b); ++m) {
      const float* activated = op.states.record(op.number, m) + C;
      const float* gates = activated + C;
      const DeltaToken token{activated + keys + key, activated + key, gates[head], gates[Hv + head]};
      const f32x16 v = load_values(activated + 2 * keys + head * Dv, Dv, first);
      const f32x16 o = delta_step(buffers + trees.from(m) * floats, buffers + trees.buffer(m) * floats, token, v, Dk);
      store_values(o, Dv, first, op.out.as<float>() + m * layer.values() + head * Dv);
    }
    if (op.states.final) store_columns(buffers, Dk, Dv, first, state);
  }
  for (int64_t m = trees.first(b); m < trees.last(b); ++m) {
    const float* z = op.rows.as<float>() + m * layer.row_columns() + C + head * Dv;
    float* out = op.out.as<float>() + m * layer.values() + head * Dv;
    const float scale = inverse_rms(out, Dv, op.eps);
    const float* norm = layer.norm.as<float>();
    int64_t i = 0;
    for (; i + kLanes <= Dv; i += kLanes) {
      store8(out + i, load8(out + i) * splat(scale) * load8(norm + i) * silu(load8(z + i)));
    }
    for (; i < Dv; ++i) out[i] = out[i] * scale * norm[i] * silu(z[i]);
  }
}

// The last inputs behind `count` final rows.
void keep_inputs(const GatedDelta& op, const Trees& trees, int64_t b) {
  const int64_t C = op.layer->channels(), kept = kConvWidth - 1, count = trees.last(b) - trees.first(b);
  float* inputs = op.states.conv_inputs(b, op.number);
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t from = i + count - kept;  // row of the request, or one of the earlier inputs
    if (from < 0) {
      std::copy_n(inputs + (i + count) * C, C, inputs + i * C);
    } else {
      std::copy_n(op.rows.as<float>() + (trees.first(b) + from) * op.layer->row_columns(), C, inputs + i * C);
    }
  }
}

void check_trees(const GatedDelta& op) {
  const KvCacheView rows{{}, {}, {}, op.states.slots, op.row_start};
  const int32_t* start = op.row_start.as<int32_t>();
  const int64_t B = op.row_start.shape[0] - 1;
  if (start[0] != 0 || start[B] != op.rows.shape[0]) fail("row_start: expected to run from 0 to ", op.rows.shape[0]);
  for (int64_t b = 0; b < B; ++b) {
    if (start[b + 1] < start[b]) fail("row_start: decreases at entry ", b + 1);
  }
  if (op.ancestors.defined()) check_ancestors(rows, op.ancestors);
  op.states.validate_slots();
}

}  // namespace

void run(const GatedDelta& op) {
  check_trees(op);
  const int64_t B = op.row_start.shape[0] - 1, M = op.rows.shape[0], Hv = op.layer->value_heads();
  const Trees trees(op.row_start, op.ancestors, M);
  parallel_for(M, [&](int64_t m) { make_record(op, trees, request_of(op.row_start.as<int32_t>(), m), m); });
  parallel_for(B * Hv, [&](int64_t task) { run_head(op, trees, task / Hv, task % Hv); });
  for (int64_t b = 0; op.states.final && b < B; ++b) keep_inputs(op, trees, b);
}

}  // namespace specengine::SPECENGINE_ISA
