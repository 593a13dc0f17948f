// One task owns one sequence: it walks the tree from the root and samples only the nodes it visits.
#include "ops/verify_tree.h"

#include "cpu/sampling.h"
#include "rules/rules.h"

namespace specengine::SPECENGINE_ISA {
namespace {

void check_ids(const TensorView& t, const char* name, int64_t begin, int64_t end, int64_t vocab) {
  const int32_t* ids = t.as<int32_t>();
  for (int64_t i = begin; i < end; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) fail(name, ": token ", ids[i], " is not in 0 to ", vocab - 1);
  }
}

void check_range(const TensorView& t, const char* name, int64_t b, float low, float high) {
  const float x = t.as<float>()[b];
  if (!(x >= low && x <= high)) fail(name, ": entry ", b, " is ", x, ", expected ", low, " to ", high);
}

void check_values(const VerifyTree& op) {
  const int64_t M = op.tokens.shape[0], V = op.scores.shape[1], B = op.bonus.shape[0], T = op.history.shape[1];
  const int32_t* row_start = op.row_start.as<int32_t>();
  const int32_t* bias_start = op.bias_start.as<int32_t>();
  if (row_start[0] != 0 || row_start[B] != M) fail("row_start: expected to run from 0 to M=", M);
  if (bias_start[0] != 0 || bias_start[B] != op.bias_tokens.shape[0]) {
    fail("bias_start: expected to run from 0 to E=", op.bias_tokens.shape[0]);
  }
  for (int64_t b = 0; b < B; ++b) {  // before any row is looked at
    const int64_t nodes = int64_t{row_start[b + 1]} - row_start[b];
    if (nodes < 1 || nodes > kMaxNodes)
      fail("row_start: sequence ", b, " has ", nodes, " nodes, expected 1 to ", kMaxNodes);
    if (nodes > op.path.shape[1]) fail("path: ", op.path.shape[1], " columns cannot hold a path of ", nodes, " nodes");
  }
  for (int64_t b = 0; b < B; ++b) {
    const int64_t nodes = row_start[b + 1] - row_start[b], length = op.history_length.as<int32_t>()[b];
    if (bias_start[b + 1] < bias_start[b]) fail("bias_start: decreases at entry ", b + 1);
    if (length < 1 || length > T) fail("history_length: entry ", b, " is ", length, ", expected 1 to ", T);
    check_ids(op.history, "history", b * T, b * T + length, V);
    const int64_t prompt = op.prompt_length.as<int32_t>()[b];
    if (prompt < 0 || prompt > length) fail("prompt_length: entry ", b, " is ", prompt, ", expected 0 to ", length);
    for (int64_t node = 0; node < nodes; ++node) {
      const int32_t parent = op.parents.as<int32_t>()[row_start[b] + node];
      if (node == 0 ? parent != -1 : parent < 0 || parent >= node) {
        fail("parents: node ", node, " of sequence ", b, " has parent ", parent,
             node == 0 ? ", expected -1 for the root" : ", expected an earlier node");
      }
    }
    if (op.top_k.as<int32_t>()[b] < 0) fail("top_k: entry ", b, " is negative");
    check_range(op.temperature, "temperature", b, 0, 1e6f);
    check_range(op.top_p, "top_p", b, 1e-9f, 1);
    check_range(op.min_p, "min_p", b, 0, 1);
    check_range(op.repetition_penalty, "repetition_penalty", b, 1e-6f, 1e6f);
    check_range(op.presence_penalty, "presence_penalty", b, -1e6f, 1e6f);
    check_range(op.frequency_penalty, "frequency_penalty", b, -1e6f, 1e6f);
  }
  check_ids(op.tokens, "tokens", 0, M, V);
  for (int64_t m = 0; op.drawn.defined() && m < M; ++m) {
    const int32_t token = op.drawn.as<int32_t>()[m];
    if (token < -1 || token >= V) fail("drawn: token ", token, " is not in -1 to ", V - 1);
  }
  check_ids(op.bias_tokens, "bias_tokens", 0, op.bias_tokens.shape[0], V);
  for (int64_t i = 0; i < op.bias_values.shape[0]; ++i) check_range(op.bias_values, "bias_values", i, -1e6f, 1e6f);
}

// What the target says at one row; kNoToken where its scores are no distribution.
int32_t target_token(const VerifyTree& op, const Sampler& sampler, int32_t row, const int32_t* path, int32_t depth) {
  if (op.drawn.defined()) return op.drawn.as<int32_t>()[row];
  return sampler.draw(op.logits.as<float>() + row * op.logits.shape[1], path, depth);
}

template <typename Rule>
void walk(const VerifyTree& op, int64_t b) {
  const int64_t N = op.path.shape[1];
  const int32_t first = op.row_start.as<int32_t>()[b], nodes = op.row_start.as<int32_t>()[b + 1] - first;
  const int32_t* tokens = op.tokens.as<int32_t>() + first;
  const int32_t* parents = op.parents.as<int32_t>() + first;
  int32_t* path = op.path.as<int32_t>() + b * N;
  std::fill(path, path + N, -1);
  const Sampler sampler(op, b);
  int32_t path_tokens[kMaxNodes];
  int32_t node = 0, depth = 0;
  while (true) {
    path[depth] = node;
    const int32_t token = target_token(op, sampler, first + node, path_tokens, depth);
    if (token == kNoToken) {
      // Reported by run(): a task must not throw. The path's last entry says where it happened.
      op.path_length.as<int32_t>()[b] = depth + 1, op.bonus.as<int32_t>()[b] = kNoToken;
      return;
    }
    const auto step = Rule::step(token, node, tokens, parents, nodes);
    if (step.child < 0) {
      op.path_length.as<int32_t>()[b] = depth + 1, op.bonus.as<int32_t>()[b] = step.token;
      return;
    }
    path_tokens[depth++] = step.token;
    node = step.child;
  }
}

}  // namespace

void run(const VerifyTree& op) {
  check_values(op);
  const int64_t B = op.bonus.shape[0];
  with_rule(op.rule, [&](auto rule) { parallel_for(B, [&](int64_t b) { walk<decltype(rule)>(op, b); }); });
  for (int64_t b = 0; b < B; ++b) {
    if (op.bonus.as<int32_t>()[b] != kNoToken) continue;
    const int32_t last = op.path_length.as<int32_t>()[b] - 1;
    fail("logits: row ", op.row_start.as<int32_t>()[b] + op.path.as<int32_t>()[b * op.path.shape[1] + last],
         " (sequence ", b, ", position ", op.history_length.as<int32_t>()[b] + last,
         ") has NaN or infinite scores, so there is no token to draw");
  }
}

}  // namespace specengine::SPECENGINE_ISA
