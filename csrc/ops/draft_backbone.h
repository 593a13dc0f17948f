// EAGLE-3's draft of a backbone with leaves in one call: the true pairs of hidden state and token first, then level by
// level what the network makes of its own output, a row per request behind those that are cached. It only calls other
// ops in order (csrc/draft_backbone.cpp): they take some tens of microseconds, less than a call from Python per op
// would.
#pragma once
#include "ops/decoder.h"

namespace specengine {

struct DraftBackbone {
  const Decoder& decoder;       // first_columns 2C; its one tap is the last layer's output
  TensorView embedding;         // packed [V, C]
  TensorView embedding_norm;    // [C] float32, of the left half of the first layer's input
  TensorView feature_norm;      // [C] float32, of the right half
  const Projection* fuse;       // makes the hidden state of what is given, C rows; None: it is given
  bool before_residual;         // the residual stream is the normed hidden state
  bool feed_back;               // what stands for the next hidden state is the output after the final norm
  const Projection& head;       // of Vd rows
  TensorView vocabulary;        // [Vd] int32, the target's token of each row of the head; None: the same
  TensorView tokens;            // [M] int32, chains of true pairs, at least one of each request
  TensorView hidden_states;     // [M, F] float32, F = C without fuse
  TensorView k_cache, v_cache;  // [layers, P, K, 64, D], written
  TensorView block_table;       // [B, max_pages] int32
  TensorView lengths;           // [B] int32, pairs that are cached
  TensorView row_start;         // [B + 1] int32
  TensorView cos, sin;          // [positions, D/2] float32
  float least;          // no further where another level lengthens a cycle's run by less, the mean of the requests
  TensorView children;  // [B, T, k] int32, written: the likeliest tokens of each level
  TensorView scores;    // [B, T, k] float32, written: their log-probabilities
  TensorView levels;    // [B] int32, written: how many of the T there are, for all the same; others are not written

  Device validate() const;
};

void run_cpu(const DraftBackbone& op);

}  // namespace specengine
