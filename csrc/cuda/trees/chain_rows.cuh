// Chains as rows of a pass, padded to as many rows for each request.
#pragma once
#include "cuda/base/arch.cuh"

namespace specengine {

struct ChainRows {
  int *tokens, *parents, *depths, *ancestors;
  int nodes, words;  // of a request; of a row's ancestors

  // Writes node `node` of request b; a token of -1 is padding.
  __device__ void write(int b, int node, int token) const {
    const int64_t row = static_cast<int64_t>(b) * nodes + node;
    const bool used = token >= 0;
    tokens[row] = token;
    parents[row] = used ? node - 1 : -1;
    depths[row] = used ? node : -1;
    for (int w = 0; w < words; ++w) {  // the node and all before it
      const int bits = min(max(node + 1 - 32 * w, 0), 32);
      ancestors[row * words + w] = static_cast<int>(!used ? 0u : bits == 32 ? ~0u : (1u << bits) - 1);
    }
  }
};

}  // namespace specengine
