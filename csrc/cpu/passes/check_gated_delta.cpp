// What a layer of gated delta rule and its states are made of, checked.
#include "ops/gated_delta/gated_delta.h"

namespace specengine {
namespace {

void check_dims(const Checker& check, int64_t key_dim, int64_t value_dim) {
  if (check.for_cuda() && (key_dim > kMaxDeltaDim || value_dim > kMaxDeltaDim)) {
    fail("states: heads of ", key_dim, " x ", value_dim, ", at most ", kMaxDeltaDim, " x ", kMaxDeltaDim,
         " are supported on cuda");
  }
}

}  // namespace

void GatedDeltaLayer::validate() const {
  Checker check;
  validate(check);
}

void GatedDeltaLayer::validate(Checker& check) const {
  Dim C{"C"}, Hv{"Hv"}, Dv{"Dv"};
  check(conv, "conv", {DType::kFloat32}, {kConvWidth, C});
  check(decay, "decay", {DType::kFloat32}, {Hv});
  check(dt_bias, "dt_bias", {DType::kFloat32}, {Hv});
  check(norm, "norm", {DType::kFloat32}, {Dv});
  if (key_heads < 1 || Hv % key_heads != 0) {
    fail("key_heads: ", Hv.value, " value heads are no multiple of ", key_heads);
  }
  const int64_t keys = C - Hv * Dv;
  if (keys < 1 || keys % (2 * key_heads) != 0) {
    fail("conv: ", C.value, " channels do not hold ", key_heads, " heads of q and k beside ", Hv * Dv, " values");
  }
}

void DeltaStates::validate(Checker& check, int64_t requests, Dim& rows) const {
  Dim layers{"layers"}, pool{"slots"}, Hv{"Hv"}, Dk{"Dk"}, Dv{"Dv"}, C{"C"};
  check(states, "states", {DType::kFloat32}, {pool, layers, Hv, Dk, Dv});
  check(conv, "conv", {DType::kFloat32}, {pool, layers, kConvWidth - 1, C});
  check(slots, "slots", {DType::kInt32}, {requests});
  check(records, "records", {DType::kFloat32}, {final ? 1 : layers, rows, 2 * C + 2 * Hv});
}

void DeltaStates::validate_slots() const {
  for (int64_t b = 0; b < slots.shape[0]; ++b) {
    if (slot(b) < 0 || slot(b) >= states.shape[0]) {
      fail("slots: entry ", b, " is ", slot(b), ", expected 0 to ", states.shape[0] - 1);
    }
    for (int64_t other = 0; other < b; ++other) {
      if (slot(other) == slot(b)) fail("slots: requests ", other, " and ", b, " have the same slot");
    }
  }
}

Device GatedDelta::validate() const {
  Checker check;
  Dim M{"M"}, W{"W"};
  const int64_t B = row_start.shape[0] - 1;
  check(rows, "rows", {DType::kFloat32}, {M, layer->row_columns()});
  check(row_start, "row_start", {DType::kInt32}, {B + 1});
  check.optional(ancestors, "ancestors", {DType::kInt32}, {M, W});
  if (check.for_cuda()) {
    check(out, "out", {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {M, layer->values()});
  } else {
    check(out, "out", {DType::kFloat32}, {M, layer->values()});
  }
  layer->validate(check);
  states.validate(check, B, M);
  check(states.states, "states", {DType::kFloat32},
        {states.states.shape[0], states.layers(), layer->value_heads(), layer->key_dim(), layer->value_dim()});
  check(states.conv, "conv", {DType::kFloat32},
        {states.states.shape[0], states.layers(), kConvWidth - 1, layer->channels()});
  if (number < 0 || number >= states.layers()) {
    fail("number: expected 0 to ", states.layers() - 1, ", got ", number);
  }
  if (states.final && ancestors.defined()) fail("ancestors: expected None where all rows are final");
  check_dims(check, layer->key_dim(), layer->value_dim());
  if (check.for_cuda() && ancestors.defined() && W > kMaxNodes / 32) {
    fail("ancestors: expected at most ", kMaxNodes / 32, " words on cuda, got ", W.value);
  }
  return check.device();
}

Device CompactStates::validate() const {
  Checker check;
  Dim M{"M"}, N{"N"};
  const int64_t B = row_start.shape[0] - 1;
  if (states.final) fail("states: expected records of every layer, the pass wrote the states itself");
  check(row_start, "row_start", {DType::kInt32}, {B + 1});
  check(path, "path", {DType::kInt32}, {B, N});
  check(path_length, "path_length", {DType::kInt32}, {B});
  states.validate(check, B, M);
  const int64_t Hv = states.states.shape[2], values = Hv * states.states.shape[4];
  const int64_t keys = states.conv.shape[3] - values;
  if (key_heads < 1 || Hv % key_heads != 0 || keys != 2 * key_heads * states.states.shape[3]) {
    fail("key_heads: ", key_heads, " heads of ", states.states.shape[3], " do not match ", keys,
         " channels of q and k");
  }
  check_dims(check, states.states.shape[3], states.states.shape[4]);
  return check.device();
}

}  // namespace specengine
