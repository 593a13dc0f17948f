// EAGLE-3's draft of a backbone with leaves in one call: first the true pairs of hidden state and token, then level by
// level the network's own output, one row per request behind the cached ones. It calls other ops in order
// (drafting/draft_backbone.cpp): an op takes some tens of microseconds, less than a call from Python would.
#pragma once
#include "ops/decoder.h"

namespace specengine {

// The weights of the drafter, checked once.
struct BackboneNetwork {
  Decoder decoder;               // first_columns: 2 hidden; hidden_state_layers: the last layer's output
  TensorView embedding;          // packed [V, hidden]
  TensorView embedding_norm;     // [hidden] float32, of the left half of the first layer's input
  TensorView hidden_state_norm;  // [hidden] float32, of the right half
  Projection fuse;               // makes hidden states from columns of several layers; no weights: they are given
  bool before_residual;          // the residual stream is the normed hidden state
  bool feed_back;                // the next level's hidden state is the output after the final norm
  Projection head;               // of Vd rows
  OptionalTensor vocabulary;     // [Vd] int32, the target's token of each row of the head; None: the same

  bool fuses() const { return !fuse.weights.empty(); }
  void validate() const;
};

// Another level is drafted while it is expected to lengthen the request's accepted run by a share of at least
// min_level_gain, in the mean over the requests: the expectation assumes that the next token is as likely as the mean
// of those above it.
struct DraftBackbone {
  const BackboneNetwork* network;
  TensorView tokens;         // [M] int32, chains of true pairs, at least one of each request
  TensorView hidden_states;  // [M, F] float32, F = hidden without fuse
  KvCacheView cache;         // all layers, written; lengths: pairs that are cached
  TensorView cos;            // [positions, head_dim / 2] float32
  TensorView sin;            // [positions, head_dim / 2] float32
  float min_level_gain;
  TensorView children;  // [B, T, k] int32, written: the likeliest tokens of each level
  TensorView scores;    // [B, T, k] float32, written: their log-probabilities
  TensorView levels;  // [B] int32, written: the number of drafted levels, the same for all; later ones are not written

  Device validate() const;
};

void run_cpu(const DraftBackbone& op);

}  // namespace specengine
