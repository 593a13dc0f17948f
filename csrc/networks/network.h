// A drafter's network on the CPU, for growth/grow.h: what a draft begins with, and logits after nodes of its trees.
#pragma once
#include <memory>
#include <vector>

#include "cpu/passes/workspace.h"
#include "ops/kv_cache.h"

namespace specengine {

struct DraftSizes {
  int64_t levels, children, beam;  // at most; see GrowthShape

  int64_t expanded() const { return 1 + (levels - 1) * beam; }  // nodes, the root among them
};

// Keys and values of all layers, and rotary tables.
struct CacheTensors {
  TensorView k, v;      // [layers, pages, K, 64, D] each
  TensorView cos, sin;  // [positions, D / 2] float32 each
};

// What B requests begin a draft with: chains of the tokens that the network has not read, each request's root last.
struct DraftInputs {
  TensorView tokens;                 // [M] int32
  TensorView depths;                 // [M] int32, places in the chains
  TensorView row_start;              // [B + 1] int32
  TensorView last;                   // [B] int32, the rows of the roots
  TensorView lengths;                // [B] int32, tokens that are cached
  TensorView ends;                   // [B] int32, tokens that are cached after the chains
  TensorView block_table;            // [B, P] int32
  OptionalTensor hidden_states;      // [R, F] float32, of the target; None: the network reads none
  TensorView rows;                   // [M] int32, each token's row of hidden_states
  std::vector<CacheTensors> caches;  // of the network itself, then of the target

  int64_t requests() const { return last.shape[0]; }
  KvCacheView cache(size_t number) const {
    return {caches[number].k, caches[number].v, block_table, lengths, row_start, 0};
  }

  // Checks hidden states; returns their columns.
  int64_t check_hidden_states(Checker& check) const;
  // Checks the tokens, and the network's own cache and tables for the chains and `further` slots and positions after
  // them. vocab: tokens that the network can read.  target: whether it reads the target's cache too.
  void check_chains(Checker& check, const Decoder& decoder, int64_t vocab, int64_t further_slots,
                    int64_t further_positions, bool target = false) const;
};

// Checks that a head of so many rows can give a node its children.
void check_children(const DraftSizes& sizes, int64_t head_rows);

// The expanded nodes of a level, as rows of a pass; see BeamRows.
struct LevelRows {
  TensorView tokens;         // [B * w] int32
  TensorView own_tokens;     // [B * w] int32, as the network's head numbers them
  TensorView depths;         // [B * w] int32
  TensorView above;          // [B * w] int64, the rows of the parents among those before
  TensorView row_start;      // [B + 1] int32
  OptionalTensor ancestors;  // [B * w, W] int32 bits; None: chains
  int64_t first_node;
};

class Network {
 public:
  virtual ~Network() = default;

  // Reads the chains. Returns logits float32 [B, V] after the roots; or [T * B, V], level after level, where those of
  // all T levels depend on no drafted token.
  virtual TensorView begin() = 0;
  // Reads the nodes of the next level; returns the logits after them, valid until the next call.
  virtual TensorView step(const LevelRows& rows) = 0;
};

}  // namespace specengine
