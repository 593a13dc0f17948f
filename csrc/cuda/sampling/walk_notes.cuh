// Walks of the trees by every rule but `match`, with notes on their rows; see walk_notes.cu.
#pragma once
#include "ops/verify_tree.h"

namespace specengine {

// False: there are too many rows, no room for notes, or the rule does without.
bool walk_with_notes(const VerifyTree& op);

}  // namespace specengine
