// Grows the candidates of trees by the likeliest children that rows of logits have.
#pragma once
#include "ops/expand_backbone.h"
#include "ops/growth/grow_level.h"

namespace specengine {

// The best tokens of parts of a vocabulary: workspace.  S = ceil(Vd / kVocabularyPart).
struct VocabularyParts {
  static constexpr char kRecord[] = "VocabularyParts";
  TensorView tokens;   // [R, S, k] int32
  TensorView scores;   // [R, S, k] float32
  TensorView sums;     // [R, S] float32
  TensorView arrived;  // [counters] int32, at least B; 0 before and after
};

// The logits of the children of a level's rows.
struct LevelLogits {
  static constexpr char kRecord[] = "LevelLogits";
  TensorView logits;     // [B * w, Vd] float32, of the rows of `before`; or [B, Vd], where a request's rows share them
  OptionalTensor delta;  // [B * w, Vd] float32, added to them
  OptionalTensor confidence;  // [B * w] or [B] float32, logits of the chance that the first child is accepted
  OptionalTensor thresholds;  // [C] float32, ascending; given with widths
  OptionalTensor widths;      // [C + 1] int32; None: all rows have k children
};

// As GrowLevel, whose drafted children are the k likeliest tokens of each row and their log-probabilities. A row
// without a distribution has no children; the CPU refuses it. With a confidence, scores are the logarithms of chances:
// the first child has the confidence, the others share the rest as they share probability. With widths (CAPE), a row
// has widths[number of thresholds below its first child's chance] children, and the others do not exist.
struct ExpandLevel {
  LevelLogits level;
  VocabularyParts parts;
  OptionalTensor token_ids;  // [Vd] int32, the target's tokens; None: the drafter's are the same
  LevelEntries entries;
  TensorView roots;  // [B, 1] int32; written to column 0 where first is 1
  TensorView known;  // [B] int32, 0: the request drafts nothing
  CandidateColumns candidates;
  BeamRows before;        // tokens, depths and above are not read
  BeamRows after;         // written
  OptionalTensor origin;  // [B * w] int64, the rows that `above` names for those of `before`; None: their numbers
  int64_t first, first_node;

  Device validate() const {
    Checker check;
    Dim B{"B"}, L{"rows"}, C{"confidences"}, R{"B * w"}, V{"Vd"}, S{"S"}, k{"k"}, counters{"counters"}, T{"thresholds"};
    check(level.logits, "logits", {DType::kFloat32}, {L, V});
    check.optional(level.delta, "delta", {DType::kFloat32}, {R, V});
    check.optional(level.confidence, "confidence", {DType::kFloat32}, {C});
    check(parts.tokens, "parts.tokens", {DType::kInt32}, {R, S, k});
    check(parts.scores, "parts.scores", {DType::kFloat32}, {R, S, k});
    check(parts.sums, "parts.sums", {DType::kFloat32}, {R, S});
    check(parts.arrived, "parts.arrived", {DType::kInt32}, {counters});
    if (level.thresholds.given() != level.widths.given()) {
      fail(level.widths.given() ? "thresholds" : "widths", ": expected a tensor, got None (of both, or of neither)");
    }
    check.optional(level.thresholds, "thresholds", {DType::kFloat32}, {T});
    check.optional(level.widths, "widths", {DType::kInt32}, {T + 1});
    check.optional(token_ids, "token_ids", {DType::kInt32}, {V});
    const int64_t rows = check_growth(check, *this, B, k);
    if (R != rows) fail("parts.tokens: expected ", rows, " rows, got ", R.value);
    if (L != R && L != B) fail("logits: expected ", rows, " rows or ", B.value, ", got ", L.value);
    if (level.confidence.given() && C != R && C != B) {
      fail("confidence: expected ", rows, " entries or ", B.value, ", got ", C.value);
    }
    if (S != (V + kVocabularyPart - 1) / kVocabularyPart || (check.for_cuda() && S > kMaxVocabularyParts)) {
      fail("parts.tokens: expected a part for each ", kVocabularyPart, " of Vd=", V.value, " tokens, at most ",
           kMaxVocabularyParts, ", got ", S.value);
    }
    if (k < 1 || k > V) fail("parts.tokens: width ", k.value, ", expected 1 to Vd=", V.value);
    if (counters < B) fail("parts.arrived: expected at least ", B.value, " counters, got ", counters.value);
    return check.device();
  }
};

void run_cpu(const ExpandLevel&);
#if defined(SPECENGINE_HAVE_CUDA)
void run_cuda(const ExpandLevel&);
#endif

}  // namespace specengine
