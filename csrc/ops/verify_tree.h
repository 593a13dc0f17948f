// Walks the drafted trees with the target's logits: at each node the sampling parameters shape the distribution, the
// rule decides whether to follow a child, and the walk ends with the bonus token.
//
// The CPU samples only nodes on the walk, refuses values out of range and a walk that meets a node without a token.
// CUDA samples all nodes at once and refuses nothing:
//   - such a walk ends there with bonus -1;
//   - a row whose token is -1 is padding and never visited; neither is a row outside row_start;
//   - a sequence whose root is padding is idle: path_length 0, bonus -1, path all -1; its history is not read.
#pragma once
#include "base/check.h"
#include "base/isa.h"
#include "base/sampling.h"
#include "ops/kv_cache.h"

namespace specengine {

// What CUDA knows of a row between its launches.
constexpr int kMaxSlices = 16;
struct Candidate {
  double value;
  int64_t token;
};
struct RowState {
  uint32_t threshold;  // top-k, top-p and min-p keep keys above it, and with that key the tokens up to `last`,
  int32_t last;
  float top, min_p;                  // all of them with at least min_p of the weight of the score `top`
  Candidate candidates[kMaxSlices];  // the winners of parts of the row
};
constexpr int64_t kRowStateWords = sizeof(RowState) / sizeof(int64_t);

struct VerifyTree {
  TensorView logits;     // [M, V] float32, one row per node; None where `drawn` is given
  TensorView drawn;      // [M] int32: the target's token at every node where it is known (greedy); -1: there is none
  TensorView tokens;     // [M] int32; tokens of the nodes, row_start[b] is the root of sequence b
  TensorView parents;    // [M] int32, node index within the sequence, an earlier one; -1 for the root
  TensorView row_start;  // [B + 1] int32

  // Per-sequence sampling parameters.
  TensorView temperature;         // [B] float32; 0: the most likely token
  TensorView top_k;               // [B] int32; 0: off
  TensorView top_p;               // [B] float32, in (0, 1]; 1: off
  TensorView min_p;               // [B] float32, in [0, 1]; 0: off
  TensorView repetition_penalty;  // [B] float32; 1: off
  TensorView presence_penalty;    // [B] float32; 0: off
  TensorView frequency_penalty;   // [B] float32; 0: off
  TensorView seed;                // [B] int64
  TensorView bias_start;          // [B + 1] int32: entries of sequence b in bias_tokens and bias_values
  TensorView bias_tokens;         // [E] int32, distinct within a sequence
  TensorView bias_values;         // [E] float32

  // Committed tokens, the root last. Penalties count them and the tokens on the path.
  TensorView history;         // [B, T] int32
  TensorView history_length;  // [B] int32, >= 1; the root's absolute position is history_length - 1
  TensorView prompt_length;   // [B] int32; frequency and presence count only tokens after the prompt

  TensorView path;         // [B, N] int32, written: accepted node indices, root first, then -1
  TensorView path_length;  // [B] int32, written: root included, so it is also the number of tokens committed
  TensorView bonus;        // [B] int32, written

  TensorView scores;      // [B, V] float32, workspace; CUDA: all zero before and after
  TensorView counts;      // [B, V] int32, workspace: all zero before and after
  TensorView row_states;  // [M, 34] int64, workspace; only CUDA with logits needs it, else None will do

  std::string rule;  // its name in rules/rules.h

  Device validate() const {
    Checker check;
    Dim M{"M"}, V{"V"}, B{"B"}, E{"E"}, T{"T"}, N{"N"};
    check.optional(drawn, "drawn", {DType::kInt32}, {M});
    if (!drawn.defined()) {
      check(logits, "logits", {DType::kFloat32}, {M, V});
    } else if (logits.defined() || !logits.not_a_tensor.empty()) {
      fail("drawn: expected None where logits are given");
    }
    check(tokens, "tokens", {DType::kInt32}, {M});
    check(parents, "parents", {DType::kInt32}, {M});
    check(temperature, "temperature", {DType::kFloat32}, {B});
    check(row_start, "row_start", {DType::kInt32}, {B + 1});
    check(top_k, "top_k", {DType::kInt32}, {B});
    check(top_p, "top_p", {DType::kFloat32}, {B});
    check(min_p, "min_p", {DType::kFloat32}, {B});
    check(repetition_penalty, "repetition_penalty", {DType::kFloat32}, {B});
    check(presence_penalty, "presence_penalty", {DType::kFloat32}, {B});
    check(frequency_penalty, "frequency_penalty", {DType::kFloat32}, {B});
    check(seed, "seed", {DType::kInt64}, {B});
    check(bias_start, "bias_start", {DType::kInt32}, {B + 1});
    check(bias_tokens, "bias_tokens", {DType::kInt32}, {E});
    check(bias_values, "bias_values", {DType::kFloat32}, {E});
    check(history, "history", {DType::kInt32}, {B, T});
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(prompt_length, "prompt_length", {DType::kInt32}, {B});
    check(path, "path", {DType::kInt32}, {B, N});
    check(path_length, "path_length", {DType::kInt32}, {B});
    check(bonus, "bonus", {DType::kInt32}, {B});
    check(scores, "scores", {DType::kFloat32}, {B, V});
    check(counts, "counts", {DType::kInt32}, {B, V});
    check.optional(row_states, "row_states", {DType::kInt64}, {M, kRowStateWords});
    if (V < 1) fail("scores: expected at least one column");
    return check.device();
  }
};

SPECENGINE_CPU_OP(VerifyTree)
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const VerifyTree& op);
#endif

}  // namespace specengine
