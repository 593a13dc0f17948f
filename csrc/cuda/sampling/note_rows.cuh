// Launches before the walk of verify_rules.cu: several blocks note of every row what does not depend on the walk.
#pragma once
#include "cuda/sampling/row_notes.cuh"
#include "cuda/sampling/tree_rows.cuh"

namespace specengine {

struct NoteRows : TreeRows {
  LogitRows logits;  // of all requests
  RowNotes* notes;   // [M, 2]: of the target's row, and of the drafter's
  Needs needs;
};

// Returns the parts of each row. rows: M. requests: B. history: columns of it.
int note_rows(const NoteRows& op, int64_t rows, int64_t requests, int64_t history, int device, void* stream);

}  // namespace specengine
