// The simulator's record of a place in memory, and whether two accesses to it are ordered. Inside a block only two
// calls order accesses: __syncthreads those of all threads, __syncwarp those of the lanes that it names. Shuffles and
// votes have no memory ordering in CUDA. Between blocks: see blocks.h.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace specengine::sim {

constexpr int kLanes = 32;

enum class Access { kRead, kWrite, kAtomic, kAtomicInitialise };  // the last does not care what was there
constexpr bool is_atomic(Access access) { return access == Access::kAtomic || access == Access::kAtomicInitialise; }

// Which lanes of a warp have synchronised with each other. The clock counts __syncwarps.
struct WarpOrder {
  uint32_t clock = 1;
  uint32_t all = 0;                    // the last one that named every lane
  uint32_t seen[kLanes][kLanes] = {};  // [a][b]: b's clock at its last barrier with a, if lanes synchronised apart

  void synchronise(unsigned mask, unsigned alive) {
    ++clock;
    if (mask == alive) {
      all = clock;
      return;
    }
    uint32_t joined[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      for (int other = 0; other < kLanes; ++other) joined[other] = std::max(joined[other], seen[lane][other]);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) joined[lane] = clock;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) std::copy(joined, joined + kLanes, seen[lane]);
    }
  }
};

// When a thread did something. Epochs count block starts and __syncthreads over all launches.
struct Moment {
  uint32_t epoch = 0, clock = 0;
  int thread = -1;
};

// The current thread.
struct Accessor {
  int thread, warp, lane;
  uint32_t epoch, block_start;
  const WarpOrder& order;

  Moment now() const { return {epoch, order.clock, thread}; }
  // Whether what the lane of this warp did at `clock` comes before what this thread does now.
  bool after_lane(int other, uint32_t clock) const { return order.all > clock || order.seen[lane][other] > clock; }
  // The same of any moment in this block.
  bool after(const Moment& m) const {
    return m.thread == thread || m.epoch < epoch ||
           (m.thread / kLanes == warp && after_lane(m.thread % kLanes, m.clock));
  }
};

// The accesses of one kind to a place: in the last epoch that had any, and the last one of another block.
struct Accesses {
  uint32_t epoch = 0, clock = 0, lanes = 0;
  int16_t warp = -1, other = -1;  // lanes of one warp, and a thread of another one
  Moment before;

  void add(const Accessor& me) {
    if (epoch != me.epoch) {
      before = of_another_block(me);
      epoch = me.epoch, other = -1, lanes = 0;
    } else if (warp != me.warp) {
      other = static_cast<int16_t>(first()), lanes = 0;
    } else if (clock != me.order.clock) {
      lanes = 0;
    }
    warp = static_cast<int16_t>(me.warp), clock = me.order.clock, lanes |= 1u << me.lane;
  }

  // A thread of this block whose access does not come before what `me` does now; -1: none.
  int unordered(const Accessor& me) const {
    if (epoch != me.epoch) return -1;
    if (warp != me.warp) return first();
    if (other >= 0 && other / kLanes != me.warp) return other;
    for (uint32_t left = lanes & ~(1u << me.lane); left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (!me.after_lane(lane, clock)) return warp * kLanes + lane;
    }
    return -1;
  }

  bool of_this_block(const Accessor& me) const { return epoch >= me.block_start; }
  Moment of_another_block(const Accessor& me) const {
    return of_this_block(me) || lanes == 0 ? before : Moment{epoch, clock, first()};
  }

 private:
  int first() const { return warp * kLanes + __builtin_ctz(lanes); }
};

// One place: a word, or a byte of a word whose bytes have had different accesses.
struct Place {
  uint32_t block = 0;     // of shared memory: the block that has written it
  bool copying = false;   // an asynchronous copy to it has not been waited for
  bool in_bytes = false;  // of a word: ask its bytes instead
  Accesses writes, reads, atomics;

  void record(Access access, const Accessor& me) {
    if (access == Access::kRead) return reads.add(me);
    if (is_atomic(access)) return atomics.add(me);
    // An access after this write is also after all accesses before it.
    reads = atomics = writes = {};
    writes.add(me);
  }
};

// An access that is not ordered with the current one; did == nullptr: none.
struct Conflict {
  const char* did = nullptr;
  Access kind = Access::kRead;
  int thread = -1;
  uint32_t epoch = 0;
};

inline Conflict conflict_in_block(const Place& p, Access access, const Accessor& me) {
  int other = p.writes.unordered(me);
  if (other >= 0) return {"has written", Access::kWrite, other, me.epoch};
  if (!is_atomic(access) && (other = p.atomics.unordered(me)) >= 0)
    return {"has changed atomically", Access::kAtomic, other, me.epoch};
  if (access != Access::kRead && (other = p.reads.unordered(me)) >= 0)
    return {"has read", Access::kRead, other, me.epoch};
  return {};
}

// The places of a piece of memory, addressed by byte.
class Places {
 public:
  Places(Place* words, Place* bytes) : words_(words), bytes_(bytes) {}

  // touch(place) for every place of an access. Whole words are one place until an access tells their bytes apart.
  template <typename Touch>
  void each(size_t offset, size_t size, Access access, const Touch& touch) const {
    for (size_t w = offset / 4; 4 * w < offset + size; ++w) {
      Place& word = words_[w];
      Place* const bytes = bytes_ + 4 * w;
      const size_t from = std::max(offset, 4 * w) - 4 * w, to = std::min(offset + size, 4 * w + 4) - 4 * w;
      if (to - from == 4 && !word.in_bytes) {
        touch(word);
        continue;
      }
      if (!word.in_bytes) {
        word.in_bytes = true;
        std::fill(bytes, bytes + 4, word);
      }
      for (size_t b = from; b < to; ++b) touch(bytes[b]);
      if (to - from == 4 && access == Access::kWrite) word = bytes[0], word.in_bytes = false;
    }
  }

 private:
  Place *words_, *bytes_;
};

}  // namespace specengine::sim
