// A batch's sampling parameters and histories for kernels. A request's token counts and biases are made dense in
// workspaces of V entries, so that a pass over a row adds them in order. The workspaces are zero before and after.
#pragma once
#include "cuda/sampling/shaped_row.cuh"

namespace specengine {

// A request's, or a row's, part of the workspaces.
struct DenseShaping {
  float* biases;  // [V]
  int* counts;    // [V], see kSeen
};

struct RequestTable {
  const float* temperature;
  const int* top_k;
  const float *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int64_t* seed;
  const int *bias_start, *bias_tokens;
  const float* bias_values;
  const int *history, *history_length, *prompt_length;
  int vocab, history_columns;

  RequestTable() = default;
  RequestTable(const SamplingTable& t, const TokenHistory& h, int64_t vocab_size)
      : temperature(t.temperature.as<float>()),
        top_k(t.top_k.as<int>()),
        top_p(t.top_p.as<float>()),
        min_p(t.min_p.as<float>()),
        repetition_penalty(t.repetition_penalty.as<float>()),
        presence_penalty(t.presence_penalty.as<float>()),
        frequency_penalty(t.frequency_penalty.as<float>()),
        seed(t.seed.as<int64_t>()),
        bias_start(t.bias_start.as<int>()),
        bias_tokens(t.bias_tokens.as<int>()),
        bias_values(t.bias_values.as<float>()),
        history(h.tokens.as<int>()),
        history_length(h.length.as<int>()),
        prompt_length(h.prompt_length.as<int>()),
        vocab(static_cast<int>(vocab_size)),
        history_columns(static_cast<int>(h.tokens.shape[1])) {}

  __device__ Penalties penalties(int b) const {
    return {repetition_penalty[b], presence_penalty[b], frequency_penalty[b]};
  }
  __device__ bool filters(int b) const {
    return temperature[b] != 0.0f && ((top_k[b] > 0 && top_k[b] < vocab) || top_p[b] < 1.0f || min_p[b] > 0.0f);
  }

  // Writes a request's counts and biases to the workspaces; clear() makes them zero again. Threads first, first + step,
  // ... share the work.
  __device__ void mark(int b, const DenseShaping& dense, int first, int step) const {
    const auto see = [](int* count, bool in_prompt) {
      if (in_prompt) {
        atomicCAS(count, 0, kSeen);  // a counted output is more than kSeen's zero
      } else {
        atomicAdd(count, 1);
      }
    };
    visit(b, dense, first, step, see, [](float* bias, float value) { *bias = value; });
  }
  __device__ void clear(int b, const DenseShaping& dense, int first, int step) const {
    // A token that occurs often is cleared as often.
    visit(b, dense, first, step, [](int* count, bool) { atomicExch(count, 0); }, [](float* bias, float) { *bias = 0; });
  }

  // A row of request b, without logits, mask and path.
  __device__ Row row(int b, const DenseShaping& dense) const {
    Row row{};
    row.keep_all();
    row.penalties = penalties(b);
    row.bias = bias_start[b] < bias_start[b + 1] ? dense.biases : nullptr;
    row.counts = row.penalties.any() ? dense.counts : nullptr;
    row.vocab = vocab, row.temperature = temperature[b];
    row.seed = static_cast<uint64_t>(seed[b]);
    return row;
  }

 private:
  // Calls see(token's count, whether it is in the prompt) for the history and bias(token's bias, its value) for the
  // biases.
  template <typename See, typename Bias>
  __device__ void visit(int b, const DenseShaping& dense, int first, int step, const See& see, const Bias& bias) const {
    if (penalties(b).any()) {
      const int* tokens = history + static_cast<int64_t>(b) * history_columns;
      const int length = history_length[b], prompt = prompt_length[b];
      for (int i = first; i < length; i += step) see(dense.counts + tokens[i], i < prompt);
    }
    for (int i = bias_start[b] + first; i < bias_start[b + 1]; i += step) {
      bias(dense.biases + bias_tokens[i], bias_values[i]);
    }
  }
};

inline bool at_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace specengine
