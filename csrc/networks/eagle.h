// The networks of EAGLE drafters. They read true pairs of hidden state and token, then level by level their own output.
#pragma once
#include "networks/network.h"

namespace specengine {

// The weights, checked once.
//
// EAGLE-3 has two norms and first_columns: the first layer reads the normed embedding beside the normed hidden state,
// the head reads the output after the final norm, and `fuse` makes the hidden states of true pairs from several layers'
// states. The others have no first_columns: in every row `fuse` makes the first layer's input from the embedding beside
// the hidden state. EAGLE-1 norms neither, and its head reads the last layer's output; multi-token prediction norms
// both, and its head reads the output after the final norm.
struct EagleWeights {
  Decoder decoder;       // hidden_state_layers: the last layer's output; first_columns: 2 hidden of EAGLE-3, else 0
  TensorView embedding;  // packed [V, hidden]
  OptionalTensor embedding_norm;     // [hidden] float32; None: EAGLE-1
  OptionalTensor hidden_state_norm;  // [hidden] float32; None: EAGLE-1
  Projection fuse;                   // EAGLE-3 without weights: the hidden states are given
  bool before_residual;              // EAGLE-3: the residual stream is the normed hidden state
  bool feed_back;                    // with norms: the next level's hidden state is the output after the final norm
  Projection head;                   // of Vd rows
  OptionalTensor vocabulary;         // [Vd] int32, the target's token of each row of the head; None: the same

  bool has_norms() const { return embedding_norm.defined(); }
  bool reads_halves() const { return decoder.first_columns > 0; }
  bool fuses_pairs() const { return reads_halves() && fuse.given(); }
  void validate() const;
  // Lets waiting threads bring the weights near, for a draft that follows soon.
  void fetch() const;
};

// Begins a draft; the weights and inputs must stay. Refuses inputs that do not fit before anything is written.
std::unique_ptr<Network> open_network(const EagleWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes);

}  // namespace specengine
