// A level whose likeliest children are known, see level_growth.cuh.
#include "cuda/trees/level_growth.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

// The drafted children [R, k].  shared: whether all rows of a request have the same children.
struct Best {
  const int* tokens;
  const float* scores;
  bool shared;
};

__global__ void __launch_bounds__(kThreads) grow_level_kernel(Growth op, Best best) {
  SPECENGINE_SHARED(unsigned, keys, kMaxCandidates);
  wait_for_previous_kernel();
  const int b = blockIdx.x;
  grow_level(op, b, keys, [&](int row, int j) {
    const int64_t from = best.shared ? b : static_cast<int64_t>(b) * op.width + row;
    const int64_t place = from * op.children + j;
    return Drafted{best.tokens[place], best.scores[place]};
  });
}

}  // namespace

void run_cuda(const GrowLevel& op) {
  const int64_t B = op.roots.shape[0];
  if (B == 0) return;
  const DeviceGuard guard(op.roots.device_id);
  const Best best{op.best_tokens.as<int>(), op.best_scores.as<float>(), op.best_tokens.shape[0] == B};
  launch({"grow_level", dim3(static_cast<unsigned>(B)), dim3(kThreads), 0, op.roots.stream}, grow_level_kernel,
         growth_of(op, op.best_tokens.shape[1]), best);
}

}  // namespace specengine
