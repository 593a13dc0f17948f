// Checks the workspace of ops that find the best tokens of rows of logits.
#pragma once
#include "ops/growth/expand_level.h"

namespace specengine {

// R rows of V logits, k tokens of each.  owners: what counts arrivals, rows or requests.
inline void check_parts(Checker& check, const VocabularyParts& parts, Dim& R, const Dim& V, Dim& k, int64_t owners) {
  Dim S{"S"}, counters{"counters"};
  check(parts.tokens, "parts.tokens", {DType::kInt32}, {R, S, k});
  check(parts.scores, "parts.scores", {DType::kFloat32}, {R, S, k});
  check(parts.sums, "parts.sums", {DType::kFloat32}, {R, S});
  check(parts.arrived, "parts.arrived", {DType::kInt32}, {counters});
  if (k < 1 || k > V) fail("parts.tokens: width ", k.value, ", expected 1 to Vd=", V.value);
  if (S != (V + kVocabularyPart - 1) / kVocabularyPart) {
    fail("parts.tokens: expected a part for each ", kVocabularyPart, " of Vd=", V.value, " tokens, got ", S.value);
  }
  if (check.for_cuda() && S > kMaxVocabularyParts) {
    fail("logits: Vd=", V.value, ", at most ", kVocabularyPart * kMaxVocabularyParts, " are supported on cuda");
  }
  if (counters < owners) fail("parts.arrived: expected at least ", owners, " counters, got ", counters.value);
}

}  // namespace specengine
