// GLIDE's network: the tokens that its cache lacks, then token by token, one row per request. Every layer attends to
// its own cache, then to the target's (Du et al. 2024).
#pragma once
#include "networks/network.h"

namespace specengine {

// The weights, checked once.
struct GlideWeights {
  Decoder decoder;                  // without embedding and hidden_state_layers; every layer with its norm
  TensorView embedding;             // packed [V, hidden]
  int64_t embedding_rows;           // tokens from this number on are read as token 0
  std::vector<Projection> queries;  // of each layer, for the target's cache: target_heads * target_head_dim rows
  std::vector<Projection> outs;     // of each layer, of what was read there; both are empty without cross attention
  int64_t target_heads;
  int64_t target_head_dim;
  int64_t reach;              // keys of the target that a row may see, the newest ones; 0: all
  int64_t block;              // a row of the text sees the blocks of the target before its own
  Projection head;            // of Vd rows
  OptionalTensor vocabulary;  // [Vd] int32, the target's token of each row of the head; None: the same

  bool reads_target() const { return !queries.empty(); }
  void validate() const;
};

// Begins a draft; the weights and inputs must stay. Refuses inputs that do not fit before anything is written. The
// target's cache has all tokens but the roots.
std::unique_ptr<Network> open_network(const GlideWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes);

}  // namespace specengine
