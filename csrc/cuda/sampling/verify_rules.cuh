// verify_tree by every rule but `match`.
#pragma once
#include "ops/verify_tree.h"

namespace specengine {

void verify_by_rule(const VerifyTree& op);

}  // namespace specengine
