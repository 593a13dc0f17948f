// What the simulator remembers of a place in shared memory, and whether two accesses to it are ordered: by
// __syncthreads between the threads of a block, by __syncwarp between the lanes of a warp that both name, by nothing
// else (CUDA gives shuffles and votes no memory ordering).
#pragma once
#include <cstdint>

namespace specengine::sim {

constexpr int kLanes = 32;

// Who has synchronised with whom inside a warp. The clock counts __syncwarps.
struct WarpOrder {
  uint32_t clock = 1;
  uint32_t all = 0;                    // the last one that named every lane
  uint32_t seen[kLanes][kLanes] = {};  // [a][b]: what a has seen of b's clock, where lanes synchronised apart

  void synchronise(unsigned mask, unsigned alive) {
    ++clock;
    if (mask == alive) {
      all = clock;
      return;
    }
    uint32_t joined[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) {
        for (int other = 0; other < kLanes; ++other) {
          if (seen[lane][other] > joined[other]) joined[other] = seen[lane][other];
        }
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) joined[lane] = clock;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) {
        for (int other = 0; other < kLanes; ++other) seen[lane][other] = joined[other];
      }
    }
  }

  // Whether what `earlier` did at `when` comes before what `later` does now.
  bool ordered(int earlier, uint32_t when, int later) const { return all > when || seen[later][earlier] > when; }
};

// The thread that accesses memory now.
struct Accessor {
  int thread, warp, lane;
  uint32_t epoch;  // counts block starts and __syncthreads
  const WarpOrder& order;
};

// The accesses of one kind since the last __syncthreads: the lanes of one warp, and somebody of another one.
struct Accesses {
  uint32_t epoch = 0, clock = 0, lanes = 0;
  int16_t warp = -1, other = -1;

  void add(const Accessor& me) {
    const uint32_t bit = 1u << me.lane;
    if (epoch != me.epoch) {
      epoch = me.epoch, other = -1, lanes = 0;
    } else if (warp != me.warp) {
      other = static_cast<int16_t>(first()), lanes = 0;
    } else if (clock != me.order.clock) {
      lanes = 0;
    }
    warp = static_cast<int16_t>(me.warp), clock = me.order.clock, lanes |= bit;
  }

  // A thread whose access is not ordered before one that `me` makes now; -1: none.
  int unordered(const Accessor& me) const {
    if (epoch != me.epoch) return -1;
    if (warp != me.warp) return first();
    if (other >= 0 && other / kLanes != me.warp) return other;
    for (uint32_t left = lanes & ~(1u << me.lane); left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (!me.order.ordered(lane, clock, me.lane)) return warp * kLanes + lane;
    }
    return -1;
  }

 private:
  int first() const { return warp * kLanes + __builtin_ctz(lanes); }
};

// One place: a word, or a byte of a word whose bytes have had different accesses.
struct Place {
  uint32_t block = 0;     // the block that has written it
  bool copying = false;   // an asynchronous copy to it has not been waited for
  bool in_bytes = false;  // of a word: ask its bytes instead
  Accesses writes, reads, atomics;
};

}  // namespace specengine::sim
