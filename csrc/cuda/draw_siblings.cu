#include "ops/draw_siblings.h"
namespace specengine {
void run_cuda(const DrawSiblings&) { fail("draw_siblings: no CUDA kernel"); }
}  // namespace specengine
