// The trees of a batch with everything that shapes the distributions of their nodes: the sampling parameters and the
// tokens that penalties count.
#pragma once
#include "base/check.h"

namespace specengine {

// One entry per request.
struct SamplingTable {
  static constexpr char kRecord[] = "SamplingTable";
  TensorView temperature;         // [B] float32; 0: the most likely token
  TensorView top_k;               // [B] int32; 0: off
  TensorView top_p;               // [B] float32, in (0, 1]; 1: off
  TensorView min_p;               // [B] float32, in [0, 1]; 0: off
  TensorView repetition_penalty;  // [B] float32; 1: off
  TensorView presence_penalty;    // [B] float32; 0: off
  TensorView frequency_penalty;   // [B] float32; 0: off
  TensorView seed;                // [B] int64
  TensorView bias_start;          // [B + 1] int32: entries of request b in bias_tokens and bias_values
  TensorView bias_tokens;         // [E] int32, distinct within a request
  TensorView bias_values;         // [E] float32

  void validate(Checker& check, Dim& B) const {
    Dim E{"E"};
    check(temperature, "temperature", {DType::kFloat32}, {B});
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
  }
};

// Committed tokens, the root last. Penalties count them and the tokens on a node's path.
struct TokenHistory {
  static constexpr char kRecord[] = "TokenHistory";
  TensorView tokens;         // [B, T] int32
  TensorView length;         // [B] int32, >= 1; the root's absolute position is length - 1
  TensorView prompt_length;  // [B] int32; frequency and presence count only tokens after the prompt

  void validate(Checker& check, Dim& B) const {
    Dim T{"T"};
    check(tokens, "history", {DType::kInt32}, {B, T});
    check(length, "history_length", {DType::kInt32}, {B});
    check(prompt_length, "prompt_length", {DType::kInt32}, {B});
  }
};

// The common arguments of the ops that sample.
struct SampledTrees {
  static constexpr char kRecord[] = "SampledTrees";
  TensorView tokens;     // [M] int32; tokens of the nodes, row_start[b] is the root of request b
  TensorView parents;    // [M] int32, node index within the request, an earlier one; -1 for the root
  TensorView row_start;  // [B + 1] int32
  SamplingTable sampling;
  TokenHistory history;

  void validate(Checker& check, Dim& M, Dim& B) const {
    check(tokens, "tokens", {DType::kInt32}, {M});
    check(parents, "parents", {DType::kInt32}, {M});
    sampling.validate(check, B);
    check(row_start, "row_start", {DType::kInt32}, {B + 1});
    history.validate(check, B);
  }
};

}  // namespace specengine
