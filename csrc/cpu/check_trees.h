// The values that the CPU ops of sampling refuse: those that would lead outside a tensor and those without a meaning.
#pragma once
#include "ops/kv_cache.h"
#include "ops/sampling_table.h"

namespace specengine::SPECENGINE_ISA {

inline void check_ids(const TensorView& t, const char* name, int64_t begin, int64_t end, int64_t vocab) {
  const int32_t* ids = t.as<int32_t>();
  for (int64_t i = begin; i < end; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) fail(name, ": token ", ids[i], " is not in 0 to ", vocab - 1);
  }
}

inline void check_range(const TensorView& t, const char* name, int64_t b, float low, float high) {
  const float x = t.as<float>()[b];
  if (!(x >= low && x <= high)) fail(name, ": entry ", b, " is ", x, ", expected ", low, " to ", high);
}

// Checks trees of M nodes, histories and parameters of B requests over V tokens.
inline void check_trees(const SampledTrees& op, int64_t V) {
  const SamplingTable& table = op.sampling;
  const TokenHistory& history = op.history;
  const int64_t M = op.tokens.shape[0], B = table.seed.shape[0], T = history.tokens.shape[1];
  const int32_t* row_start = op.row_start.as<int32_t>();
  const int32_t* bias_start = table.bias_start.as<int32_t>();
  if (row_start[0] != 0 || row_start[B] != M) fail("row_start: expected to run from 0 to M=", M);
  if (bias_start[0] != 0 || bias_start[B] != table.bias_tokens.shape[0]) {
    fail("bias_start: expected to run from 0 to E=", table.bias_tokens.shape[0]);
  }
  for (int64_t b = 0; b < B; ++b) {  // before any row is read
    const int64_t nodes = int64_t{row_start[b + 1]} - row_start[b];
    if (nodes < 1 || nodes > kMaxNodes)
      fail("row_start: request ", b, " has ", nodes, " nodes, expected 1 to ", kMaxNodes);
  }
  for (int64_t b = 0; b < B; ++b) {
    const int64_t nodes = row_start[b + 1] - row_start[b], length = history.length.as<int32_t>()[b];
    if (bias_start[b + 1] < bias_start[b]) fail("bias_start: decreases at entry ", b + 1);
    if (length < 1 || length > T) fail("history_length: entry ", b, " is ", length, ", expected 1 to ", T);
    check_ids(history.tokens, "history", b * T, b * T + length, V);
    const int64_t prompt = history.prompt_length.as<int32_t>()[b];
    if (prompt < 0 || prompt > length) fail("prompt_length: entry ", b, " is ", prompt, ", expected 0 to ", length);
    for (int64_t node = 0; node < nodes; ++node) {
      const int32_t parent = op.parents.as<int32_t>()[row_start[b] + node];
      if (node == 0 ? parent != -1 : parent < 0 || parent >= node) {
        fail("parents: node ", node, " of request ", b, " has parent ", parent,
             node == 0 ? ", expected -1 for the root" : ", expected an earlier node");
      }
    }
    if (table.top_k.as<int32_t>()[b] < 0) fail("top_k: entry ", b, " is negative");
    check_range(table.temperature, "temperature", b, 0, 1e6f);
    check_range(table.top_p, "top_p", b, 1e-9f, 1);
    check_range(table.min_p, "min_p", b, 0, 1);
    check_range(table.repetition_penalty, "repetition_penalty", b, 1e-6f, 1e6f);
    check_range(table.presence_penalty, "presence_penalty", b, -1e6f, 1e6f);
    check_range(table.frequency_penalty, "frequency_penalty", b, -1e6f, 1e6f);
  }
  check_ids(op.tokens, "tokens", 0, M, V);
  check_ids(table.bias_tokens, "bias_tokens", 0, table.bias_tokens.shape[0], V);
  for (int64_t i = 0; i < table.bias_values.shape[0]; ++i) {
    check_range(table.bias_values, "bias_values", i, -1e6f, 1e6f);
  }
}

// Checks the columns of the drafter's logits by token.
inline void check_index(const TensorView& index, const char* name, int64_t columns) {
  for (int64_t v = 0; index.defined() && v < index.shape[0]; ++v) {
    const int32_t column = index.as<int32_t>()[v];
    if (column < -1 || column >= columns) fail(name, ": entry ", v, " is ", column, ", expected -1 to ", columns - 1);
  }
}

}  // namespace specengine::SPECENGINE_ISA
