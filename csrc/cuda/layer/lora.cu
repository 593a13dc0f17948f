// Adapters beside the weights, in two kernels: scaled A x of every row into the workspace, then B times that onto the
// output. Adapters are chosen by device data, so a captured graph serves all of them; a row without one does nothing.
//
// A block of the first kernel owns 16 ranks of one row: 16 threads per rank each sum every 16th column, and their sums
// are added in order. A thread of the second owns one output of one row: one chain in the order of the ranks. No sum
// depends on the other rows.
#include "cuda/base/arch.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/lora.h"

namespace specengine {
namespace {

constexpr int kLanes = static_cast<int>(kPanel);  // ranks or output columns side by side
constexpr int kSlices = 16;
constexpr int kThreads = kLanes * kSlices;

// One matrix of all adapters, as LoraModule has it.
template <typename Weight>
struct Matrices {
  const Weight *a, *b;
  const int* ranks;
  const float* scales;
  int first, rows, rank;  // rank: the padded one
  int offset;             // of its scaled A x in a row of the workspace
};

// tasks: panels of ranks (first kernel) or of outputs (second) before each module, and of all.
template <typename Weight>
struct Modules {
  Matrices<Weight> of[kMostLoraModules];
  int tasks[kMostLoraModules + 1];
  int count, columns, row_floats;
};

struct Requests {
  const int *row_start, *adapters;
  int batch, adapter_count;
};

// The adapter of a row; -1: none, or the row is padding. The threads of a block agree.
__device__ inline int adapter_of_row(const Requests& requests, int row) {
  int before = 0;
  for (int b = threadIdx.x % kWarp; b < requests.batch; b += kWarp) before += requests.row_start[b + 1] <= row;
  before = warp_reduce<Sum>(before);
  const int adapter = before < requests.batch ? requests.adapters[before] : -1;
  return adapter < requests.adapter_count ? adapter : -1;
}

template <typename Weight>
__device__ inline int module_of(const Modules<Weight>& modules, int task) {
  int m = 0;
  while (m + 1 < modules.count && task >= modules.tasks[m + 1]) ++m;
  return m;
}

template <typename X, typename Weight>
__global__ void __launch_bounds__(kThreads)
    lora_shrink_kernel(const X* x, Modules<Weight> modules, Requests requests, float* sums) {
  SPECENGINE_SHARED(float, parts, kThreads);
  wait_for_previous_kernel();
  const int row = blockIdx.x, lane = threadIdx.x % kLanes, slice = threadIdx.x / kLanes, K = modules.columns;
  const int number = module_of(modules, blockIdx.y), panel = blockIdx.y - modules.tasks[number];
  const Matrices<Weight>& module = modules.of[number];
  const int adapter = adapter_of_row(requests, row);
  if (adapter < 0 || panel * kLanes >= module.ranks[adapter]) return;
  const Weight* a = module.a + (static_cast<int64_t>(adapter) * (module.rank / kLanes) + panel) * K * kLanes;
  const X* from = x + static_cast<int64_t>(row) * K;
  float sum = 0;
  for (int c = slice; c < K; c += kSlices) {
    sum = fmaf(to_float(from[c]), to_float(a[static_cast<int64_t>(c) * kLanes + lane]), sum);
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (slice != 0) return;
  float total = parts[lane];
  for (int s = 1; s < kSlices; ++s) total += parts[s * kLanes + lane];
  const int64_t at = static_cast<int64_t>(row) * modules.row_floats + module.offset + panel * kLanes + lane;
  sums[at] = total * module.scales[adapter];
}

template <typename Weight>
__global__ void __launch_bounds__(kThreads)
    lora_expand_kernel(const float* sums, Modules<Weight> modules, Requests requests, float* out, int columns) {
  wait_for_previous_kernel();
  const int row = blockIdx.x, lane = threadIdx.x % kLanes, task = blockIdx.y * kSlices + threadIdx.x / kLanes;
  const int adapter = adapter_of_row(requests, row);
  if (adapter < 0 || task >= modules.tasks[modules.count]) return;
  const int number = module_of(modules, task), panel = task - modules.tasks[number];
  const Matrices<Weight>& module = modules.of[number];
  const int rank = module.ranks[adapter], column = panel * kLanes + lane, panels = (module.rows + kLanes - 1) / kLanes;
  if (rank == 0 || column >= module.rows) return;
  const Weight* b = module.b + (static_cast<int64_t>(adapter) * panels + panel) * module.rank * kLanes + lane;
  const float* scaled = sums + static_cast<int64_t>(row) * modules.row_floats + module.offset;
  float sum = 0;
  for (int r = 0; r < rank; ++r) sum = fmaf(scaled[r], to_float(b[static_cast<int64_t>(r) * kLanes]), sum);
  out[static_cast<int64_t>(row) * columns + module.first + column] += sum;
}

template <typename Weight, typename Tasks>
Modules<Weight> modules_of(const LoraProjection& projection, const Tasks& tasks_of) {
  Modules<Weight> modules{};
  for (const LoraModule& each : projection.modules) {
    const int number = modules.count++;
    modules.of[number] = {each.a.as<Weight>(),           each.b.as<Weight>(),
                          each.ranks.as<int>(),          each.scales.as<float>(),
                          static_cast<int>(each.first),  static_cast<int>(each.rows),
                          static_cast<int>(each.rank()), modules.row_floats};
    modules.tasks[modules.count] = modules.tasks[number] + static_cast<int>(tasks_of(each));
    modules.columns = static_cast<int>(each.columns());
    modules.row_floats += static_cast<int>(each.rank());
  }
  return modules;
}

template <typename Weight>
void launch_for(const AddLora& op) {
  const Requests requests{op.row_start.as<int>(), op.adapters.as<int>(), static_cast<int>(op.adapters.shape[0]),
                          static_cast<int>(op.projection->adapters())};
  const unsigned rows = static_cast<unsigned>(op.out.shape[0]);
  float* sums = op.workspace.as<float>();
  const auto ranks = modules_of<Weight>(*op.projection, [](const LoraModule& m) { return m.rank() / kLanes; });
  with_float_type(op.x.dtype, [&](auto zero) {
    using X = decltype(zero);
    const dim3 grid(rows, static_cast<unsigned>(ranks.tasks[ranks.count]));
    launch({"add_lora", grid, kThreads, 0, op.out.stream}, lora_shrink_kernel<X, Weight>, op.x.as<X>(), ranks, requests,
           sums);
  });
  const auto outputs = modules_of<Weight>(*op.projection, [](const LoraModule& m) { return m.panels(); });
  const dim3 grid(rows, static_cast<unsigned>((outputs.tasks[outputs.count] + kSlices - 1) / kSlices));
  launch({"add_lora", grid, kThreads, 0, op.out.stream}, lora_expand_kernel<Weight>, sums, outputs, requests,
         op.out.as<float>(), static_cast<int>(op.out.shape[1]));
}

}  // namespace

void run_cuda(const AddLora& op) {
  if (op.out.numel() == 0 || op.projection->modules.empty()) return;
  const DeviceGuard guard(op.out.device_id);
  with_float_type(op.projection->modules[0].a.dtype, [&](auto zero) { launch_for<decltype(zero)>(op); });
}

}  // namespace specengine
