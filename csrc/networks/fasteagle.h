// FastEagle's network: the true pairs of hidden state and token pass the layers once, and each layer's output at a
// request's last pair is a level.
#pragma once
#include "networks/network.h"

namespace specengine {

// The weights, checked once. Two forms of the first layer's input exist:
// - first_columns = 0: fuse makes a row of the hidden states, each normed without a weight, and of the embedding;
// - first_columns = 2 hidden, EAGLE-3's: fuse makes a row of the hidden states alone, which is the residual stream;
//   q, k and v are made of the normed embedding and that row, normed too.
struct FastEagleWeights {
  Decoder decoder;                   // hidden_state_layers: every layer's output
  TensorView embedding;              // packed [V, hidden]
  Projection fuse;                   // of `hidden` rows
  OptionalTensor embedding_norm;     // [hidden] float32; with first_columns only
  OptionalTensor hidden_state_norm;  // [hidden] float32; with first_columns only
  OptionalTensor head_norm;          // [hidden] float32, before the head; None: there is none
  Projection head;                   // of Vd rows
  // A level's logits get markov_head of the row of markov_tokens that belongs to the likeliest token of the level
  // above.
  int64_t markov_rank;           // r; 0: a level does not know the one above
  OptionalTensor markov_tokens;  // packed [Vd, r]
  Projection markov_head;        // of Vd rows and r columns; no weights where r is 0
  OptionalTensor vocabulary;     // [Vd] int32, the target's token of each row of the head; None: the same

  bool reads_halves() const { return decoder.first_columns > 0; }
  void validate() const;
};

// Begins a draft; the weights and inputs must stay. Refuses inputs that do not fit before anything is written.
std::unique_ptr<Network> open_network(const FastEagleWeights& weights, const DraftInputs& inputs,
                                      const DraftSizes& sizes);

}  // namespace specengine
