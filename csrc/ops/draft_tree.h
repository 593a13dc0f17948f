// EAGLE's draft of a tree in one call: first the true pairs of hidden state and token, then level by level the
// network's own output. A level's rows are the nodes that are expanded next, and they see their own paths. The op calls
// other ops in order (drafting/draft_tree.cpp): an op takes some tens of microseconds, less than a call from Python
// would.
#pragma once
#include "ops/decoder.h"

namespace specengine {

// The weights of an EAGLE drafter, checked once.
//
// EAGLE-3 has two norms: the first layer reads the normed embedding beside the normed hidden state, the head reads the
// output after the final norm, and `fuse` makes the hidden states of true pairs from several layers' states.
// EAGLE-1 has neither norm: in every row `fuse` makes the first layer's input from the embedding beside the hidden
// state, and the last layer's output is what the head reads.
struct EagleWeights {
  Decoder decoder;       // hidden_state_layers: the last layer's output; first_columns: 2 hidden of EAGLE-3, else 0
  TensorView embedding;  // packed [V, hidden]
  OptionalTensor embedding_norm;     // [hidden] float32; None: EAGLE-1
  OptionalTensor hidden_state_norm;  // [hidden] float32; None: EAGLE-1
  Projection fuse;                   // EAGLE-3 without weights: the hidden states are given
  bool before_residual;              // EAGLE-3: the residual stream is the normed hidden state
  bool feed_back;                    // EAGLE-3: the next level's hidden state is the output after the final norm
  Projection head;                   // of Vd rows
  OptionalTensor vocabulary;         // [Vd] int32, the target's token of each row of the head; None: the same

  bool has_norms() const { return embedding_norm.defined(); }
  bool fuses_pairs() const { return has_norms() && !fuse.weights.empty(); }
  void validate() const;
  // Lets waiting threads bring the weights near, for a draft that follows soon.
  void fetch() const;
};

struct DraftedTrees {
  static constexpr char kRecord[] = "DraftedTrees";
  TensorView tokens;       // [B, N] int32: the root and the nodes level by level, in the target's tokens
  TensorView parents;      // [B, N] int32: nodes; -1 for the root
  TensorView chances;      // [B, N] float32: the probability of a node given its parent; 1 for the root
  TensorView node_counts;  // [B] int32; entries past it have no meaning
  TensorView levels;       // [B] int32: the number of drafted levels, the same for all
};

// The tree of draft_trees/dynamic.py, cut by select_nodes: every level expands the `beam` likeliest nodes of the level
// before, `top_k` children each, and the nodes with the highest products of probabilities are kept.
//
// Levels end before one that is expected to add fewer than min_level_tokens, the sum over the requests. The
// expectation: where the text reaches a node that is expanded with probability r (the sum over the beam, at most 1)
// after d levels, it reaches one of the next level with probability r^(1 + 1/d), as if the next token were as likely as
// the mean of those above it.
struct DraftTree {
  const EagleWeights* weights;
  TensorView tokens;         // [M] int32, chains of true pairs, at least one of each request; the last one is the root
  TensorView hidden_states;  // [R, F] float32; F = hidden where fuse does not make them
  TensorView rows;           // [M] int32, each pair's row of hidden_states
  KvCacheView cache;         // all layers, written; lengths: pairs that are cached
  TensorView cos;            // [positions, head_dim / 2] float32
  TensorView sin;            // [positions, head_dim / 2] float32
  int64_t levels;            // at most
  int64_t top_k;
  int64_t beam;
  float min_level_tokens;
  float min_reach;     // nodes that the text reaches with less probability are left out
  TensorView limits;   // [B] int32, deepest level of each request's tree
  DraftedTrees trees;  // written

  Device validate() const;
};

void run_cpu(const DraftTree& op);

}  // namespace specengine
