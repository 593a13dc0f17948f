// The product of a block with a weight in codes: as float_product.cuh, but a warp's turn is a chunk of 128 columns,
// whose codes become numbers in registers on their way to the tensor cores.
//
// A chunk is copied as it lies in memory. A lane multiplies the codes that it copied itself; scales are copied by other
// lanes of its warp, so the loop has a barrier of the warp and none of the block.
#pragma once
#include "cuda/layer/coded.cuh"
#include "cuda/layer/product.cuh"

namespace specengine {

constexpr int kCodedWarps = 8;  // in all plans, so that a row's bits do not depend on M
constexpr int kBlocks = 4;      // of 32 columns, in a chunk

template <CodedKind kKind, int kRows, int kGroups>
struct CodedPlan {
  static constexpr int kTiles = kRows / kTile, kThreads = kCodedWarps * kWarp;
  static constexpr int kSize = kTiles * bits_of(kKind) / 4;  // of a warp's turn, in KiB of codes
  static constexpr int kStages = kSize == 1 ? 4 : kSize == 2 ? 3 : 2;
  static constexpr int kPieces = bits_of(kKind) / 4;  // of a lane's codes of a row
  static constexpr int kPieceBlocks = kBlocks / kPieces;
  static constexpr int kAhead = kGroups <= 2 ? kBlocks : 1;  // blocks of x that are loaded at once
  static constexpr int kCodeBytes = kStages * kCodedWarps * kSize * 1024;
};

// Called by all threads of the block, as multiply_floats. ring: the stages of the plan, kCodedWarps * kTiles chunks
// each.
template <CodedKind kKind, CodedValue kValue, int kRows, int kGroups, typename XOffset, typename Wait>
__device__ inline void multiply_codes(const BFloat16* x, const XOffset& x_offset_of, const unsigned char* weight,
                                      const CodedChunk& form, const Result& result, int columns, int first_x_row,
                                      int first_row, uint4* ring, const Wait& wait_for_x) {
  using P = CodedPlan<kKind, kRows, kGroups>;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int panel = first_row / kCodedRows, panels = (result.columns + kCodedRows - 1) / kCodedRows;
  const int chunks = (columns + kCodedColumns - 1) / kCodedColumns;
  const int my_chunks = (chunks - warp + kCodedWarps - 1) / kCodedWarps;

  int64_t x_offset[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) x_offset[i] = x_offset_of(i * kGroup + lane / kQuad);
  weight += (static_cast<int64_t>(panel) * chunks + warp) * form.bytes;
  unsigned char* const slots = reinterpret_cast<unsigned char*>(ring) + warp * P::kTiles * form.bytes;
  const int stage_bytes = kCodedWarps * P::kTiles * form.bytes;
  const auto fetch = [&](int step, int stage) {
#pragma unroll
    for (int tile = 0; tile < P::kTiles; ++tile) {
      const int64_t place = (static_cast<int64_t>(tile) * chunks + step * kCodedWarps) * form.bytes;
      for (int at = lane * kPieceBytes; at < form.bytes; at += kWarp * kPieceBytes) {
        copy_async_16(slots + stage * stage_bytes + tile * form.bytes + at, weight + place + at, panel + tile < panels);
      }
    }
  };

  Sums<BFloat16, P::kTiles, kGroups> sums;
  for (int step = 0; step < P::kStages - 1; ++step) {
    if (step < my_chunks) fetch(step, step);
    commit_copies();
  }
  wait_for_x();
  int stage = 0, next = P::kStages - 1;
  for (int step = 0; step < my_chunks; ++step) {
    const int first_column = (step * kCodedWarps + warp) * kCodedColumns + lane % kQuad * kColumns;
    uint4 x_pieces[P::kAhead][kGroups];
    const auto load_x = [&](int first) {
#pragma unroll
      for (int i = 0; i < P::kAhead; ++i) {
        const int column = first_column + (first + i) * kQuad * kColumns;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const BFloat16* from = x + x_offset[group] + column;
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
      const int column = block * kQuad * kColumns;
      if (column % (1 << form.group_bits) == 0) {
        load_groups<kKind, kValue>(groups, turn, form, lane / kQuad, column + lane % kQuad * kColumns);
      }
      uint4 pieces[kHalves * P::kTiles];
#pragma unroll
      for (int i = 0; i < kHalves * P::kTiles; ++i) {
        const unsigned char* const chunk = turn + i / kHalves * form.bytes;
        const int half = i % kHalves;
        if (block % P::kPieceBlocks == 0) {
          const int piece = half * P::kPieces + block / P::kPieceBlocks;
          codes[i] = reinterpret_cast<const uint4*>(chunk)[piece * kWarp + lane];
        }
        const unsigned all[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        unsigned words[kCodeWords<kKind>];
#pragma unroll
        for (int w = 0; w < kCodeWords<kKind>; ++w) words[w] = all[block % P::kPieceBlocks * kCodeWords<kKind> + w];
        float values[kColumns];
        values_of<kKind, kValue>(values, words, groups[i]);
        pieces[i] = {pack_two<BFloat16>(values[0], values[1]), pack_two<BFloat16>(values[2], values[3]),
                     pack_two<BFloat16>(values[4], values[5]), pack_two<BFloat16>(values[6], values[7])};
      }
      sums.add(pieces, x_pieces[block % P::kAhead]);
    }
    next = stage;
    stage = stage + 1 < P::kStages ? stage + 1 : 0;
  }
  Parts<kRows, kCodedWarps, kGroups, P::kCodeBytes>::add(sums, ring, result, first_x_row, first_row);
}

}  // namespace specengine
