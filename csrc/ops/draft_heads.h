// Medusa's draft of all levels in one call: one head per level reads the target's last hidden state. It calls other ops
// in order (drafting/draft_heads.cpp).
#pragma once
#include "ops/decoder.h"

namespace specengine {

// x becomes x + silu(block(x)) block by block, then logits.
struct DraftHead {
  std::vector<Projection> blocks;  // of `hidden` rows and columns each
  Projection logits;               // of Vd rows
};

// The weights of the drafter, checked once. Heads that follow each other and have the same logits weights share a
// product, which reads the weights once.
struct HeadsNetwork {
  int64_t hidden;
  std::vector<DraftHead> heads;  // head 0 drafts the token behind the root
  OptionalTensor vocabulary;     // [Vd] int32, the target's token of each row of the logits; None: the same

  void validate() const;
  int64_t tokens() const { return heads.at(0).logits.total_rows(); }  // Vd
};

struct DraftHeads {
  const HeadsNetwork* network;
  TensorView rows;      // [B, hidden] float32, the target's last hidden states before the roots
  TensorView children;  // [B, T, k] int32, written: the likeliest tokens of each level, T at most the heads
  TensorView scores;    // [B, T, k] float32, written: their log-probabilities

  Device validate() const;
};

void run_cpu(const DraftHeads& op);

}  // namespace specengine
