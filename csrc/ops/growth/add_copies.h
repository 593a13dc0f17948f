// Adds copies of earlier text to the candidates of a network, so that one tree has the likeliest nodes of both.
#pragma once
#include "ops/draft_lookup.h"
#include "ops/growth/grow_level.h"

namespace specengine {

// The chain is that of DraftLookup, of L = M' - M tokens. Its beginning may be a path of candidates: these keep the
// higher of both scores. The rest of it are columns M on, below the last candidate of the path, each the only child of
// the one before; those of the beginning have depth -1. A node's score is the sum of `chances` along the chain, of the
// class of the match's length, which grows with each node: 1, 2-3, 4-7, 8-15, 16 or more tokens.
// Of a request that is not known, its candidates below the root are left out. An idle request gets no chain.
struct AddCopies {
  TensorView history;           // [B, T] int32, committed tokens, the root last
  TensorView history_length;    // [B] int32, root included
  TensorView active;            // [B] int32, 0: idle
  TensorView known;             // [B] int32, 0: the candidates are not drafted
  TensorView chances;           // [5] float32, log-probabilities, none above 0
  CandidateColumns candidates;  // [B, M]
  CandidateColumns joined;      // [B, M'], written
  TensorView joined_known;      // [B] int32, written: whether there are candidates or a chain
  int64_t min_ngram, max_ngram;

  static constexpr int64_t kClasses = 5;
  static constexpr int64_t kLongestChain = 64;

  Device validate() const {
    Checker check;
    Dim B{"B"}, T{"T"}, M{"M"}, joined_columns{"M'"};
    check(history, "history", {DType::kInt32}, {B, T});
    if (!check.for_cuda()) fail("history: expected a tensor on cuda");
    check(history_length, "history_length", {DType::kInt32}, {B});
    check(active, "active", {DType::kInt32}, {B});
    check(known, "known", {DType::kInt32}, {B});
    check(chances, "chances", {DType::kFloat32}, {kClasses});
    check_columns(check, candidates, "candidates", B, M);
    check_columns(check, joined, "joined", B, joined_columns);
    check(joined_known, "joined_known", {DType::kInt32}, {B});
    const int64_t length = joined_columns - M;
    if (length < 1 || length > kLongestChain || joined_columns > kMaxCandidates) {
      fail("joined: expected ", M + 1, " to ", std::min(M + kLongestChain, int64_t{kMaxCandidates}), " columns, got ",
           joined_columns.value);
    }
    check_ngrams(min_ngram, max_ngram);
    return check.device();
  }

 private:
  static void check_columns(Checker& check, const CandidateColumns& columns, const std::string& name, Dim& B, Dim& M) {
    check(columns.tokens, (name + ".tokens").c_str(), {DType::kInt32}, {B, M});
    check(columns.parents, (name + ".parents").c_str(), {DType::kInt32}, {B, M});
    check(columns.depths, (name + ".depths").c_str(), {DType::kInt32}, {B, M});
    check(columns.scores, (name + ".scores").c_str(), {DType::kFloat32}, {B, M});
  }
};

#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const AddCopies&);
#endif

}  // namespace specengine
