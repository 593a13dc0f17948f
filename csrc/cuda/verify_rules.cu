#include "cuda/verify_rules.cuh"
namespace specengine {
void verify_by_rule(const VerifyTree& op) { fail("rule: ", op.rule, " has no CUDA kernel"); }
}  // namespace specengine
