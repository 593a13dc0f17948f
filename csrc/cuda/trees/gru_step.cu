// A thread owns an element of a state. Floor: 28 bytes read per element, and what is written.
#include "ops/growth/gru_step.h"

#include "cuda/base/arch.cuh"

namespace specengine {
namespace {

constexpr int kThreads = 256;

struct Gru {
  const float *read, *kept, *state;
  const int64_t* above;
  float* next;
  int64_t states;
  int size;
};

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename Rounded>
__global__ void __launch_bounds__(kThreads) gru_step_kernel(Gru op, Rounded* rounded) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const int c = blockIdx.y * kThreads + threadIdx.x;
  if (c >= op.size) return;
  const float* read = op.read + row * 3 * op.size + c;
  float kept[3] = {0, 0, 0}, before = 0;
  if (op.kept != nullptr) {
    const int64_t from = op.above == nullptr ? row : min(max(op.above[row], int64_t{0}), op.states - 1);
    for (int i = 0; i < 3; ++i) kept[i] = op.kept[(from * 3 + i) * op.size + c];
    before = op.state[from * op.size + c];
  }
  const float update = sigmoid(read[op.size] + kept[1]);
  const float fresh = tanhf(read[2 * op.size] + sigmoid(read[0] + kept[0]) * kept[2]);
  const float next = (1.0f - update) * fresh + update * before;
  op.next[row * op.size + c] = next;
  if (rounded != nullptr) rounded[row * op.size + c] = from_float<Rounded>(next);
}

}  // namespace

void run_cuda(const GruStep& op) {
  if (op.next.numel() == 0) return;
  const DeviceGuard guard(op.next.device_id);
  const int64_t rows = op.next.shape[0], size = op.next.shape[1];
  const Gru gru{op.read.as<float>(),    op.kept.as<float>(), op.state.as<float>(),
                op.above.as<int64_t>(), op.next.as<float>(), op.state.given() ? op.state.shape[0] : 0,
                static_cast<int>(size)};
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>((size + kThreads - 1) / kThreads));
  with_float_type(op.rounded.given() ? op.rounded.dtype : DType::kFloat32, [&](auto zero) {
    using Rounded = decltype(zero);
    launch({"gru_step", grid, kThreads, 0, op.next.stream}, gru_step_kernel<Rounded>, gru, op.rounded.as<Rounded>());
  });
}

}  // namespace specengine
