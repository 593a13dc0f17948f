// Medusa's network: one head per level reads the target's hidden state before the root.
#pragma once
#include "networks/network.h"

namespace specengine {

// x becomes x + silu(block(x)) block by block, then logits.
struct DraftHead {
  std::vector<Projection> blocks;  // of `hidden` rows and columns each
  Projection logits;               // of Vd rows
};

// The weights, checked once. Heads that follow each other and have the same logits weights share a
// product, which reads the weights once.
struct HeadsWeights {
  int64_t hidden;
  std::vector<DraftHead> heads;  // head 0 drafts the token after the root
  OptionalTensor vocabulary;     // [Vd] int32, the target's token of each row of the logits; None: the same

  void validate() const;
  int64_t tokens() const { return heads.at(0).logits.total_rows(); }  // Vd
};

// Begins a draft; the weights and inputs must stay. Refuses inputs that do not fit before anything is written.
std::unique_ptr<Network> open_network(const HeadsWeights& weights, const DraftInputs& inputs, const DraftSizes& sizes);

}  // namespace specengine
