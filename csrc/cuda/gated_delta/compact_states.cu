// Replays the accepted paths on the committed states, all layers in one launch: the steps are those of the pass, on the
// same records. A block owns a value head of a request's layer, or the last inputs of some of its channels. Floor: the
// states of the accepted requests, read once and written once.
#include "cuda/gated_delta/delta_step.cuh"

namespace specengine {
namespace delta {
namespace {

struct Replay {
  Heads heads;
  float *states, *inputs;
  const float* records;
  const int *slots, *row_start, *path, *path_length;
  int layers, rows, most;  // rows: of the pass.  most: entries of a path
};

__global__ void __launch_bounds__(kMostThreads) compact_states_kernel(const Replay op) {
  SPECENGINE_SHARED(float4, vectors, 2 * kVectors / 4);
  wait_for_previous_kernel();
  const int head = blockIdx.x, layer = blockIdx.y, request = blockIdx.z;
  const Heads& h = op.heads;
  const int count = op.path_length[request];
  if (count <= 0) return;
  const int* path = op.path + static_cast<int64_t>(request) * op.most;
  const int64_t first_row = static_cast<int64_t>(layer) * op.rows + op.row_start[request];
  const int64_t place = static_cast<int64_t>(op.slots[request]) * op.layers + layer;
  const auto record = [&](int i) { return op.records + (first_row + path[i]) * h.record_floats(); };
  if (head >= h.value_heads) {
    const int channel = (head - h.value_heads) * blockDim.x + threadIdx.x;
    return keep_inputs(op.inputs + place * (kConvWidth - 1) * h.channels, h.channels, channel, count, record);
  }
  float* committed = op.states + (place * h.value_heads + head) * h.key_dim * h.value_dim;
  Column state;
  state.load(h, committed);
  const auto next = [&](int i) { return i + 1 < count ? i + 1 : -1; };
  walk(h, head, 0, state, vectors, next, record, [](int, float, int) { __syncthreads(); });
  state.store(h, committed);
}

}  // namespace
}  // namespace delta

void run_cuda(const CompactStates& op) {
  const TensorView &states = op.states.states, &inputs = op.states.conv;
  if (op.path.numel() == 0 || states.numel() == 0) return;
  const DeviceGuard guard(states.device_id);
  const auto size = [](int64_t n) { return static_cast<int>(n); };
  const delta::Heads heads{size(op.key_heads),    size(states.shape[2]), size(states.shape[3]),
                           size(states.shape[4]), size(inputs.shape[3]), op.tiled};
  const delta::Replay replay{heads,
                             states.as<float>(),
                             inputs.as<float>(),
                             op.states.records.as<float>(),
                             op.states.slots.as<int>(),
                             op.row_start.as<int>(),
                             op.path.as<int>(),
                             op.path_length.as<int>(),
                             size(states.shape[1]),
                             size(op.states.records.shape[1]),
                             size(op.path.shape[1])};
  const unsigned threads = heads.threads();
  const dim3 grid(heads.value_heads + delta::blocks_of(heads.channels, threads), replay.layers,
                  static_cast<unsigned>(op.path.shape[0]));
  launch({"compact_states", grid, threads, 0, states.stream}, delta::compact_states_kernel, replay);
}

}  // namespace specengine
