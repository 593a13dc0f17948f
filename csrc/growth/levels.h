// A level of trees on the CPU, whose children were found before.
#pragma once
#include "ops/growth/expand_level.h"

namespace specengine {

// Does what the op does, with the likeliest children that lie in its parts: [B * w, k]; shared: [B, k], of all rows of
// a request.
void add_level(const ExpandLevel& op, bool shared);

}  // namespace specengine
