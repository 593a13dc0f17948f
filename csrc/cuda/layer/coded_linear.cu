// Skinny GEMM with a weight in codes: as linear.cu, but a warp's turn is a chunk of 128 columns, whose codes become
// numbers in registers on their way to the tensor cores.
//
// A chunk is copied as it lies in memory. A lane multiplies the codes that it copied itself; scales are copied by other
// lanes of its warp, so the loop has a barrier of the warp and none of the block.
#include "ops/coded/linear.h"

#include "cuda/layer/coded.cuh"
#include "cuda/layer/product.cuh"

namespace specengine {
namespace {

constexpr int kWarps = 8;   // in all plans, so that a row's bits do not depend on M
constexpr int kBlocks = 4;  // of 32 columns, in a chunk
constexpr int kHalves = 2;  // of a panel: the rows l / 4 and l / 4 + 8 of a lane l

template <CodedKind kKind, int kRows, int kGroups>
struct Plan {
  static constexpr int kTiles = kRows / kTile, kThreads = kWarps * kWarp;
  static constexpr int kSize = kTiles * bits_of(kKind) / 4;  // of a warp's turn, in KiB of codes
  static constexpr int kStages = kSize == 1 ? 4 : kSize == 2 ? 3 : 2;
  static constexpr int kPieces = bits_of(kKind) / 4;  // of a lane's codes of a row
  static constexpr int kPieceBlocks = kBlocks / kPieces;
  static constexpr int kAhead = kGroups <= 2 ? kBlocks : 1;  // blocks of x that are loaded at once
  static constexpr int kCodeBytes = kStages * kWarps * kSize * 1024;
};

template <typename T, CodedKind kKind, CodedValue kValue, int kRows, int kGroups>
__global__ void __launch_bounds__(kWarps* kWarp)
    coded_linear_kernel(const T* x, const unsigned char* weight, CodedChunk form, Result result, int columns) {
  using P = Plan<kKind, kRows, kGroups>;
  wait_for_previous_kernel();
  SPECENGINE_DYNAMIC_SHARED(uint4, ring);

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int x_tiles = (result.rows + kGroups * kGroup - 1) / (kGroups * kGroup);
  const int first_x_row = blockIdx.x % x_tiles * kGroups * kGroup;  // blocks that share weights are neighbours
  const int first_row = blockIdx.x / x_tiles * kRows;
  const int panel = first_row / kCodedRows, panels = (result.columns + kCodedRows - 1) / kCodedRows;
  const int chunks = (columns + kCodedColumns - 1) / kCodedColumns;
  const int my_chunks = (chunks - warp + kWarps - 1) / kWarps;

  x += static_cast<int64_t>(first_x_row) * columns;
  int64_t x_offset[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    // The sums of a row of x past the end are not used: any row serves.
    x_offset[i] = static_cast<int64_t>(min(i * kGroup + lane / kQuad, result.rows - 1 - first_x_row)) * columns;
  }
  weight += (static_cast<int64_t>(panel) * chunks + warp) * form.bytes;
  unsigned char* const slots = reinterpret_cast<unsigned char*>(ring) + warp * P::kTiles * form.bytes;
  const int stage_bytes = kWarps * P::kTiles * form.bytes;
  const auto fetch = [&](int step, int stage) {
#pragma unroll
    for (int tile = 0; tile < P::kTiles; ++tile) {
      const int64_t place = (static_cast<int64_t>(tile) * chunks + step * kWarps) * form.bytes;
      for (int at = lane * kPieceBytes; at < form.bytes; at += kWarp * kPieceBytes) {
        copy_async_16(slots + stage * stage_bytes + tile * form.bytes + at, weight + place + at, panel + tile < panels);
      }
    }
  };

  Sums<T, P::kTiles, kGroups> sums;
  for (int step = 0; step < P::kStages - 1; ++step) {
    if (step < my_chunks) fetch(step, step);
    commit_copies();
  }
  int stage = 0, next = P::kStages - 1;
  for (int step = 0; step < my_chunks; ++step) {
    const int first_column = (step * kWarps + warp) * kCodedColumns + lane % kQuad * kColumns;
    uint4 x_pieces[P::kAhead][kGroups];
    const auto load_x = [&](int first) {
#pragma unroll
      for (int i = 0; i < P::kAhead; ++i) {
        const int column = first_column + (first + i) * kQuad * kColumns;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const T* from = x + x_offset[group] + column;
          x_pieces[i][group] = column < columns ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
        }
      }
    };
    load_x(0);
    wait_for_copies<P::kStages - 2>();
    __syncwarp();  // the scales are there; and all lanes have read the stage that is overwritten now
    if (step + P::kStages - 1 < my_chunks) fetch(step + P::kStages - 1, next);
    commit_copies();  // even if nothing is left to fetch: the wait counts groups

    const unsigned char* const turn = slots + stage * stage_bytes;
    uint4 codes[kHalves * P::kTiles];
    CodedGroup groups[kHalves * P::kTiles];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block > 0 && block % P::kAhead == 0) load_x(block);
      uint4 pieces[kHalves * P::kTiles];
#pragma unroll
      for (int i = 0; i < kHalves * P::kTiles; ++i) {
        const unsigned char* const chunk = turn + i / kHalves * form.bytes;
        const int half = i % kHalves, column = block * kQuad * kColumns;
        if (block % P::kPieceBlocks == 0) {
          const int piece = half * P::kPieces + block / P::kPieceBlocks;
          codes[i] = reinterpret_cast<const uint4*>(chunk)[piece * kWarp + lane];
        }
        if (column % (1 << form.group_bits) == 0) {
          groups[i] =
              load_group<kKind, kValue>(chunk, form, half * kGroup + lane / kQuad, column + lane % kQuad * kColumns);
        }
        const unsigned all[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        unsigned words[kCodeWords<kKind>];
#pragma unroll
        for (int w = 0; w < kCodeWords<kKind>; ++w) words[w] = all[block % P::kPieceBlocks * kCodeWords<kKind> + w];
        float values[kColumns];
        values_of<kKind, kValue>(values, words, groups[i]);
        pieces[i] = {pack_two<T>(values[0], values[1]), pack_two<T>(values[2], values[3]),
                     pack_two<T>(values[4], values[5]), pack_two<T>(values[6], values[7])};
      }
      sums.add(pieces, x_pieces[block % P::kAhead]);
    }
    next = stage;
    stage = stage + 1 < P::kStages ? stage + 1 : 0;
  }
  Parts<kRows, kWarps, kGroups, P::kCodeBytes>::add(sums, ring, result, first_x_row, first_row);
}

struct Product {
  const char* name;
  const TensorView &x, &weight;
  CodedChunk form;
  Result result;
};

template <typename T, CodedKind kKind, CodedValue kValue, int kRows, int kGroups>
void launch_plan(const Product& p) {
  using P = Plan<kKind, kRows, kGroups>;
  const int64_t blocks = (p.result.columns + kRows - 1) / kRows;
  const int64_t x_tiles = (p.x.shape[0] + kGroups * kGroup - 1) / (kGroups * kGroup);
  launch({p.name, static_cast<unsigned>(blocks * x_tiles), P::kThreads,
          static_cast<size_t>(P::kStages * kWarps * P::kTiles * p.form.bytes), p.weight.stream},
         coded_linear_kernel<T, kKind, kValue, kRows, kGroups>, p.x.as<T>(), p.weight.as<unsigned char>(), p.form,
         p.result, static_cast<int>(p.x.shape[1]));
}

// The more rows of x, the more rows of the weight must share what is read of x.
template <typename T, CodedKind kKind, CodedValue kValue>
void launch_kind(const Product& p) {
  constexpr int kMost = bits_of(kKind) == 4 ? 64 : 32;  // rows whose chunks fit into shared memory
  const int64_t M = p.x.shape[0];
  if (M <= 2) return launch_plan<T, kKind, kValue, 16, 1>(p);
  if (M <= 8) return launch_plan<T, kKind, kValue, 32, 1>(p);
  if (M <= 16) return launch_plan<T, kKind, kValue, kMost, 2>(p);
  if (M <= 32) return launch_plan<T, kKind, kValue, 32, 4>(p);
  launch_plan<T, kKind, kValue, 32, 8>(p);
}

void launch_any(const Product& p) {
  with_kind(p.form, [&](auto kind, auto value) {
    if (p.x.dtype == DType::kBFloat16) return launch_kind<BFloat16, kind, value>(p);
    launch_kind<Half, kind, value>(p);
  });
}

constexpr int kThreads = 128;

// A thread owns 8 columns of a row.
template <CodedKind kKind, CodedValue kValue>
__global__ void __launch_bounds__(kThreads) gather_coded_kernel(const unsigned char* weight, CodedChunk form,
                                                                const int* ids, float* out, int rows, int columns) {
  wait_for_previous_kernel();
  const int64_t m = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns, id = ids[m];
  if (column >= columns) return;
  float4 values[2] = {};
  if (id >= 0 && id < rows) {
    constexpr int kWords = kCodeWords<kKind>, kPieceBlocks = kBlocks / kWords;
    const int64_t chunks = (columns + kCodedColumns - 1) / kCodedColumns;
    const unsigned char* const chunk =
        weight + (id / kCodedRows * chunks + column / kCodedColumns) * static_cast<int64_t>(form.bytes);
    const int row = id % kCodedRows, in_chunk = column % kCodedColumns, block = in_chunk / (kQuad * kColumns);
    const int piece = row / kGroup * kWords + block / kPieceBlocks;
    const int lane = row % kGroup * kQuad + in_chunk / kColumns % kQuad;
    const unsigned* const from =
        reinterpret_cast<const unsigned*>(chunk + (piece * kWarp + lane) * kPieceBytes) + block % kPieceBlocks * kWords;
    unsigned words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = from[w];
    float eight[kColumns];
    values_of<kKind, kValue>(eight, words, load_group<kKind, kValue>(chunk, form, row, in_chunk));
    values[0] = {eight[0], eight[1], eight[2], eight[3]}, values[1] = {eight[4], eight[5], eight[6], eight[7]};
  }
  float4* const to = reinterpret_cast<float4*>(out + m * columns + column);
  to[0] = values[0], to[1] = values[1];
}

}  // namespace

void run_cuda(const CodedLinear& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0 || op.rows == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() + op.first : nullptr;
  const Result result{bias,    op.out.as<float>() + op.first, op.out.shape[1],
                      nullptr, static_cast<int>(M),           static_cast<int>(op.rows)};
  launch_any({"coded_linear", op.x, op.weight, op.form.chunk(), result});
}

void run_cuda(const CodedLinearArgmax& op) {
  const int64_t M = op.x.shape[0];
  if (M == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const float* bias = op.bias.defined() ? op.bias.as<float>() : nullptr;
  argmax_of_product("coded_linear_argmax", op.keys, op.ids, [&](long long* keys) {
    const Result result{bias, nullptr, 0, keys, static_cast<int>(M), static_cast<int>(op.rows)};
    launch_any({"coded_linear_argmax", op.x, op.weight, op.form.chunk(), result});
  });
}

void run_cuda(const GatherCoded& op) {
  if (op.out.numel() == 0) return;
  const DeviceGuard guard(op.weight.device_id);
  const int columns = static_cast<int>(op.out.shape[1]), pieces = columns / kColumns;
  const dim3 grid(static_cast<unsigned>(op.ids.shape[0]), static_cast<unsigned>((pieces + kThreads - 1) / kThreads));
  const CodedChunk form = op.form.chunk();
  const int rows = static_cast<int>(op.weight.shape[0]) * kCodedRows;
  with_kind(form, [&](auto kind, auto value) {
    launch({"gather_coded", grid, kThreads, 0, op.weight.stream}, gather_coded_kernel<kind, value>,
           op.weight.as<unsigned char>(), form, op.ids.as<int>(), op.out.as<float>(), rows, columns);
  });
}

}  // namespace specengine
