// Launches before the walks of walk_notes.cu: several blocks note of every row what does not depend on the walk.
#pragma once
#include "cuda/sampling/rule_rows.cuh"

namespace specengine {

struct NoteRows {
  RuleRows rows;
  int64_t count, requests, history;  // M; B; columns of the history
  int device;
  void* stream;
};

// Returns the parts of each row.
int note_rows(const NoteRows& op);

}  // namespace specengine
