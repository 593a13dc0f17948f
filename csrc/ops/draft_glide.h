// GLIDE's draft in one call: the tokens that its cache lacks, then token by token greedily, one row per request. Every
// layer attends to its own cache, then to the target's (Du et al. 2024). It calls other ops in order
// (drafting/draft_glide.cpp).
#pragma once
#include "ops/decoder.h"

namespace specengine {

// The weights of the drafter, checked once.
struct GlideNetwork {
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

// Another level is drafted while it is expected to add at least min_level_tokens, the sum over the requests: the
// expectation assumes that the next token is as likely as the mean of those above it.
struct DraftGlide {
  const GlideNetwork* network;
  TensorView tokens;      // [M] int32, chains: of each request the tokens that its cache lacks, the root last
  KvCacheView cache;      // all layers, written; lengths: tokens that are cached
  KvCacheView target;     // all layers of the target on the same pages: its block_table and row_start are not read;
                          // lengths: tokens in the target's cache, all but the root, at least one
  TensorView cos;         // [positions, head_dim / 2] float32
  TensorView sin;         // [positions, head_dim / 2] float32
  TensorView target_cos;  // [positions, target_head_dim / 2] float32
  TensorView target_sin;  // [positions, target_head_dim / 2] float32
  float min_level_tokens;
  TensorView children;  // [B, T, k] int32, written: the likeliest tokens of each level
  TensorView scores;    // [B, T, k] float32, written: their log-probabilities
  TensorView levels;  // [B] int32, written: the number of drafted levels, the same for all; later ones are not written

  Device validate() const;
};

void run_cpu(const DraftGlide& op);

}  // namespace specengine
