// The product of a block with a weight of floats: warps take turns along the columns, 64 bytes of every row at a time;
// product.cuh adds their sums.
//
// A lane copies to shared memory, several steps ahead, the pieces of the weight that it will multiply itself, so the
// loop has no barrier. A piece is 16 consecutive bytes of one row: the tensor cores want other columns than these in a
// lane's registers, but the order of a sum's terms is free as long as both factors keep to it.
#pragma once
#include "cuda/layer/product.cuh"

namespace specengine {

constexpr int kStepBytes = 64;    // of a row
constexpr int kRing = 48 * 1024;  // bytes of the weight on their way to a block, about

template <typename Weight>
constexpr int kPiece = sizeof(uint4) / sizeof(Weight);  // columns
template <typename Weight>
constexpr int kStep = kStepBytes / sizeof(Weight);  // columns

template <typename Weight, int kRows, int kWarps, int kGroups>
struct FloatPlan {
  static constexpr int kTiles = kRows / kTile, kThreads = kWarps * kWarp;
  static constexpr int kStageBytes = kWarps * kRows * kStepBytes;
  static constexpr int kStages = kRing / kStageBytes < 3 ? 3 : kRing / kStageBytes > 6 ? 6 : kRing / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

// Called by all threads of the block. x_offset_of(i): where row i of the tile begins in x, of any row where i is past
// the end, because those sums are not used.  first_x_row: of the tile, in the result.  ring: the plan's shared memory.
// wait_for_x: called once the first pieces of the weight are under way, before x is read.  result: see Parts::add.
template <typename Weight, int kRows, int kWarps, int kGroups, typename XOffset, typename Taker, typename Wait>
__device__ inline void multiply_floats(const Weight* x, const XOffset& x_offset_of, const Weight* weight,
                                       const Taker& result, int columns, int first_x_row, int first_row, uint4* ring,
                                       const Wait& wait_for_x) {
  using P = FloatPlan<Weight, kRows, kWarps, kGroups>;
  using WarpSums = Sums<Weight, P::kTiles, kGroups>;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int row = first_row / (Taker::kPaired ? 2 : 1) + lane / kQuad;
  const int first_column = warp * kStep<Weight> + lane % kQuad * kPiece<Weight>;
  const int steps = (columns + kStep<Weight> - 1) / kStep<Weight>;
  const int my_steps = (steps - warp + kWarps - 1) / kWarps;

  weight += static_cast<int64_t>(row) * columns + first_column;
  x += first_column;
  decltype(x_offset_of(0)) x_offset[WarpSums::kPieces];
#pragma unroll
  for (int i = 0; i < WarpSums::kPieces; ++i) x_offset[i] = x_offset_of(WarpSums::x_row(i, lane));
  uint4* const slots = ring + warp * 2 * P::kTiles * kWarp + lane;  // of stage 0
  constexpr int kStageSlots = P::kStageBytes / static_cast<int>(sizeof(uint4));
  const auto fetch = [&](int step, int stage) {
    const int column = step * kWarps * kStep<Weight>;
#pragma unroll
    for (int i = 0; i < 2 * P::kTiles; ++i) {
      const int half = Taker::kPaired ? result.columns / 2 : result.columns;  // rows, all of the weight's or its half
      const int ahead = Taker::kPaired ? i / 2 * 8 : i * 8;
      const int second = Taker::kPaired && i % 2 == 1 ? half : 0;
      const bool exists = row + ahead < half && first_column + column < columns;
      copy_async_16(slots + stage * kStageSlots + i * kWarp,
                    weight + static_cast<int64_t>(second + ahead) * columns + column, exists);
    }
  };

  WarpSums sums;
  for (int step = 0; step < P::kStages - 1; ++step) {
    if (step < my_steps) fetch(step, step);
    commit_copies();
  }
  wait_for_x();
  int stage = 0, next = P::kStages - 1;
  for (int step = 0; step < my_steps; ++step) {
    const int column = step * kWarps * kStep<Weight>;
    const bool exists = first_column + column < columns;
    uint4 x_pieces[WarpSums::kPieces], pieces[2 * P::kTiles];
#pragma unroll
    for (int i = 0; i < WarpSums::kPieces; ++i) {
      x_pieces[i] = exists ? *reinterpret_cast<const uint4*>(x + x_offset[i] + column) : uint4{0, 0, 0, 0};
    }
    wait_for_copies<P::kStages - 2>();
#pragma unroll
    for (int i = 0; i < 2 * P::kTiles; ++i) pieces[i] = slots[stage * kStageSlots + i * kWarp];
    if (step + P::kStages - 1 < my_steps) fetch(step + P::kStages - 1, next);
    commit_copies();  // even if nothing is left to fetch: the wait counts groups
    sums.add(pieces, x_pieces);
    next = stage;
    stage = stage + 1 < P::kStages ? stage + 1 : 0;
  }

  Parts<kRows, kWarps, kGroups, P::kSharedBytes>::add(sums, ring, result, first_x_row, first_row);
}

}  // namespace specengine
