// Where the last tokens of a text occurred before; a block searches the text of one request.
#pragma once
#include "cuda/base/reduce.cuh"

namespace specengine {

// An earlier occurrence of the last `length` tokens; what follows it begins at `end`. length 0: there is none.
struct LongestMatch {
  int length, end;

  // The token at place i behind the match. Behind the end of the text it repeats itself, as a loop does.
  __device__ int following(const int* tokens, int text_length, int i) const {
    return tokens[end + i % (text_length - end)];
  }
};

// Finds the longest match of at least min_ngram tokens, compared up to max_ngram; of equals the newest. Every thread
// gets it. scratch: shared, kWarp entries.
__device__ inline LongestMatch longest_match(const int* tokens, int text_length, int min_ngram, int max_ngram,
                                             unsigned long long* scratch) {
  unsigned long long best = 0;
  for (int end = 1 + threadIdx.x; end < text_length; end += blockDim.x) {
    int match = 0;
    while (match < min(max_ngram, end) && tokens[end - 1 - match] == tokens[text_length - 1 - match]) ++match;
    if (match >= min_ngram) best = max(best, static_cast<unsigned long long>(match) << 32 | unsigned(end));
  }
  best = block_reduce<Max>(best, scratch);
  return {static_cast<int>(best >> 32), static_cast<int>(best)};
}

}  // namespace specengine
