// Barriers, warp collectives and atomics of CUDA.
#pragma once
#include <bit>
#include <cstring>
#include <source_location>
#include <type_traits>

#include "sim/block.h"
#include "sim/memory.h"

namespace specengine::sim {

using Where = std::source_location;

// A lane's argument of a collective, and its result.
template <typename T>
struct Exchange {
  T value;
  int other;
  T result;
};

// One collective of type Exchange<T>: the last lane calls combine(lanes, mask, lane) for each lane's result. Its
// arguments lie on other threads' stacks, so nothing here may be checked.
template <typename T, typename Combine>
[[gnu::no_sanitize_thread]] T exchange(const char* name, unsigned mask, T value, int other, Combine,
                                       const Where& where) {
  Exchange<T> mine{value, other, value};
  collective(
      name, mask, &mine,
      [](void* const* arguments, unsigned lanes) {
        Exchange<T>* const* all = reinterpret_cast<Exchange<T>* const*>(arguments);
        for (int lane = 0; lane < kLanes; ++lane) {
          if (lanes >> lane & 1) all[lane]->result = Combine()(all, lanes, lane);
        }
      },
      where);
  return mine.result;
}

enum class Shuffle { kIndex, kUp, kDown, kXor };

// PTX's shfl: the lane to read, which is the calling one outside its segment of `width` lanes.
int shuffle_source(Shuffle kind, const char* name, unsigned mask, int by, int width, const Where& where);
void fence();

template <typename T>
T shuffle(Shuffle kind, const char* name, unsigned mask, T value, int by, int width, const Where& where) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 2, 4 or 8 bytes");
  const int source = shuffle_source(kind, name, mask, by, width, where);
  return exchange(
      name, mask, value, source, [](auto lanes, unsigned, int lane) { return lanes[lanes[lane]->other]->value; },
      where);
}

// As C++ promotes an argument to CUDA's overload for int.
template <typename T>
using Promoted = std::conditional_t<std::is_integral_v<T> && sizeof(T) < 4, int, T>;

struct AddOf {
  template <typename T>
  static T combine(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct MinOf {
  template <typename T>
  static T combine(T a, T b) {
    return b < a ? b : a;
  }
};
struct MaxOf {
  template <typename T>
  static T combine(T a, T b) {
    return b > a ? b : a;
  }
};
struct AndOf {
  template <typename T>
  static T combine(T a, T b) {
    return a & b;
  }
};
struct OrOf {
  template <typename T>
  static T combine(T a, T b) {
    return a | b;
  }
};
struct XorOf {
  template <typename T>
  static T combine(T a, T b) {
    return a ^ b;
  }
};

template <typename Op, typename T>
T reduce(const char* name, unsigned mask, T value, const Where& where) {
  return exchange(
      name, mask, value, 0,
      [](auto lanes, unsigned mask, int) {
        T total{};
        bool first = true;
        for (int lane = 0; lane < kLanes; ++lane) {
          if (mask >> lane & 1)
            total = first ? lanes[lane]->value : Op::combine(total, lanes[lane]->value), first = false;
        }
        return total;
      },
      where);
}

inline unsigned ballot(const char* name, unsigned mask, bool predicate, const Where& where) {
  return exchange(
      name, mask, static_cast<unsigned>(predicate), 0,
      [](auto lanes, unsigned mask, int) {
        unsigned votes = 0;
        for (int lane = 0; lane < kLanes; ++lane) {
          if (mask >> lane & 1) votes |= lanes[lane]->value << lane;
        }
        return votes;
      },
      where);
}

// Reads and replaces a value atomically and returns the old one. `initialises`: ignores the old value.
template <typename T, typename Update>
[[gnu::no_sanitize_thread]] T atomic(T* place, const Update& update, bool initialises = false) {
  check(place, sizeof(T), initialises ? Access::kAtomicInitialise : Access::kAtomic, Site(__builtin_return_address(0)));
  const T before = *place;
  *place = update(before);
  return before;
}

}  // namespace specengine::sim

#define SPECENGINE_SIM_WHERE const ::specengine::sim::Where& where = ::specengine::sim::Where::current()

inline void __syncthreads(SPECENGINE_SIM_WHERE) {
  specengine::sim::barrier(specengine::sim::Vote::kNone, 0, "__syncthreads", where);
}
inline int __syncthreads_and(int predicate, SPECENGINE_SIM_WHERE) {
  return specengine::sim::barrier(specengine::sim::Vote::kAnd, predicate, "__syncthreads_and", where);
}
inline int __syncthreads_or(int predicate, SPECENGINE_SIM_WHERE) {
  return specengine::sim::barrier(specengine::sim::Vote::kOr, predicate, "__syncthreads_or", where);
}
inline int __syncthreads_count(int predicate, SPECENGINE_SIM_WHERE) {
  return specengine::sim::barrier(specengine::sim::Vote::kCount, predicate, "__syncthreads_count", where);
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, SPECENGINE_SIM_WHERE) {
  specengine::sim::synchronise_warp(mask, where);
}

#define SPECENGINE_SIM_SHUFFLE(name, kind)                                                                            \
  template <typename T>                                                                                               \
  auto name(unsigned mask, T value, int by, int width = 32, SPECENGINE_SIM_WHERE) {                                   \
    return specengine::sim::shuffle<specengine::sim::Promoted<T>>(specengine::sim::Shuffle::kind, #name, mask, value, \
                                                                  by, width, where);                                  \
  }
SPECENGINE_SIM_SHUFFLE(__shfl_sync, kIndex)
SPECENGINE_SIM_SHUFFLE(__shfl_up_sync, kUp)
SPECENGINE_SIM_SHUFFLE(__shfl_down_sync, kDown)
SPECENGINE_SIM_SHUFFLE(__shfl_xor_sync, kXor)
#undef SPECENGINE_SIM_SHUFFLE

inline unsigned __activemask() { return specengine::sim::lanes_alive(); }
inline unsigned __ballot_sync(unsigned mask, int predicate, SPECENGINE_SIM_WHERE) {
  return specengine::sim::ballot("__ballot_sync", mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate, SPECENGINE_SIM_WHERE) {
  return specengine::sim::ballot("__any_sync", mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SPECENGINE_SIM_WHERE) {
  return specengine::sim::ballot("__all_sync", mask, predicate != 0, where) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, SPECENGINE_SIM_WHERE) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA matches 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return static_cast<unsigned>(specengine::sim::exchange(
      "__match_any_sync", mask, bits, 0,
      [](auto lanes, unsigned mask, int lane) {
        uint64_t equal = 0;
        for (int other = 0; other < specengine::sim::kLanes; ++other) {
          if ((mask >> other & 1) && lanes[other]->value == lanes[lane]->value) equal |= uint64_t{1} << other;
        }
        return equal;
      },
      where));
}

#define SPECENGINE_SIM_REDUCE(name, Op, type)                                       \
  inline type name(unsigned mask, type value, SPECENGINE_SIM_WHERE) {               \
    return specengine::sim::reduce<specengine::sim::Op>(#name, mask, value, where); \
  }
SPECENGINE_SIM_REDUCE(__reduce_add_sync, AddOf, unsigned)
SPECENGINE_SIM_REDUCE(__reduce_min_sync, MinOf, unsigned)
SPECENGINE_SIM_REDUCE(__reduce_max_sync, MaxOf, unsigned)
SPECENGINE_SIM_REDUCE(__reduce_add_sync, AddOf, int)
SPECENGINE_SIM_REDUCE(__reduce_min_sync, MinOf, int)
SPECENGINE_SIM_REDUCE(__reduce_max_sync, MaxOf, int)
SPECENGINE_SIM_REDUCE(__reduce_and_sync, AndOf, unsigned)
SPECENGINE_SIM_REDUCE(__reduce_or_sync, OrOf, unsigned)
SPECENGINE_SIM_REDUCE(__reduce_xor_sync, XorOf, unsigned)
#undef SPECENGINE_SIM_REDUCE

// The types CUDA has an overload for; an argument is converted to the place's type, as overloads do.
#define SPECENGINE_SIM_ATOMIC(name, type, result)                                               \
  inline type name(type* place, type value) {                                                   \
    return specengine::sim::atomic(place, [&](type old) { return static_cast<type>(result); }); \
  }
#define SPECENGINE_SIM_ATOMIC_INTEGERS(name, result) \
  SPECENGINE_SIM_ATOMIC(name, int, result)           \
  SPECENGINE_SIM_ATOMIC(name, unsigned, result)      \
  SPECENGINE_SIM_ATOMIC(name, unsigned long long, result)
SPECENGINE_SIM_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(value))
SPECENGINE_SIM_ATOMIC(atomicAdd, unsigned, old + value)
SPECENGINE_SIM_ATOMIC(atomicAdd, unsigned long long, old + value)
SPECENGINE_SIM_ATOMIC(atomicAdd, float, old + value)
SPECENGINE_SIM_ATOMIC(atomicAdd, double, old + value)
SPECENGINE_SIM_ATOMIC(atomicSub, int, static_cast<unsigned>(old) - static_cast<unsigned>(value))
SPECENGINE_SIM_ATOMIC(atomicSub, unsigned, old - value)
SPECENGINE_SIM_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1u)
SPECENGINE_SIM_ATOMIC_INTEGERS(atomicMax, old > value ? old : value)
SPECENGINE_SIM_ATOMIC_INTEGERS(atomicMin, old < value ? old : value)
SPECENGINE_SIM_ATOMIC(atomicMax, long long, old > value ? old : value)
SPECENGINE_SIM_ATOMIC(atomicMin, long long, old < value ? old : value)
SPECENGINE_SIM_ATOMIC_INTEGERS(atomicAnd, old& value)
SPECENGINE_SIM_ATOMIC_INTEGERS(atomicOr, old | value)
SPECENGINE_SIM_ATOMIC_INTEGERS(atomicXor, old ^ value)
#undef SPECENGINE_SIM_ATOMIC_INTEGERS
#undef SPECENGINE_SIM_ATOMIC
#define SPECENGINE_SIM_ATOMIC_SWAP(type)                                                            \
  inline type atomicExch(type* place, type value) {                                                 \
    return specengine::sim::atomic(place, [&](type) { return value; }, true);                       \
  }                                                                                                 \
  inline type atomicCAS(type* place, type expected, type value) {                                   \
    return specengine::sim::atomic(place, [&](type old) { return old == expected ? value : old; }); \
  }
SPECENGINE_SIM_ATOMIC_SWAP(int)
SPECENGINE_SIM_ATOMIC_SWAP(unsigned)
SPECENGINE_SIM_ATOMIC_SWAP(unsigned long long)
#undef SPECENGINE_SIM_ATOMIC_SWAP
inline float atomicExch(float* place, float value) {
  return specengine::sim::atomic(place, [&](float) { return value; }, true);
}
#undef SPECENGINE_SIM_WHERE

// One thread runs at a time and nothing is reordered; a fence only counts as order between blocks (sim/blocks.h).
inline void __threadfence() { specengine::sim::fence(); }
inline void __threadfence_block() {}

template <typename T>
T __ldg(const T* place) {
  return *place;
}
template <typename T>
T __ldcg(const T* place) {
  return *place;
}
template <typename T>
T __ldcs(const T* place) {
  return *place;
}
template <typename T>
void __stcg(T* place, T value) {
  *place = value;
}
template <typename T>
void __stcs(T* place, T value) {
  *place = value;
}
