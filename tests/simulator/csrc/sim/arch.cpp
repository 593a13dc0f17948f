#include "cuda/base/arch.cuh"

#include <cstring>
#include <numeric>

#include "sim/counters.h"

namespace specengine::sim {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;

void check_aligned(const void* p, const char* what, const Where& where) {
  if (reinterpret_cast<uintptr_t>(p) % 16 == 0) return;
  finding(std::string(what) + ": the address ends in " + std::to_string(reinterpret_cast<uintptr_t>(p) % 16) +
              " of 16, but must be divisible by 16",
          where);
}

// Reads of 16 bytes from the one kind of memory the instruction takes.
void check_global(const void* p, const Where& where) {
  if (is_shared(reinterpret_cast<uintptr_t>(p))) finding("a shared address where a global one is needed", where);
  touch_memory(reinterpret_cast<uintptr_t>(p), 16, Access::kRead, where);
}
void check_shared(const void* p, const Where& where) {
  if (!is_shared(reinterpret_cast<uintptr_t>(p))) finding("a global address where a shared one is needed", where);
  touch_shared(reinterpret_cast<uintptr_t>(p), 16, Access::kRead, where);
}

struct Matrices {
  const char* row;
  uint32_t* r;
  bool transposed;
};

struct Product {
  float* c;
  const uint32_t *a, *b;
  float (*to_float)(uint16_t);
};

// Element 2 * pair + half of what a lane's registers hold.
float element(const uint32_t* registers, int which, int half, float (*to_float)(uint16_t)) {
  return to_float(static_cast<uint16_t>(registers[which] >> (16 * half)));
}

void load_for_warp(void* const* arguments, unsigned) {
  const auto at = [&](int lane) { return static_cast<const Matrices*>(arguments[lane]); };
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto half = [&](int row, int column) {
        uint16_t bits;
        std::memcpy(&bits, at(8 * matrix + row)->row + 2 * column, 2);
        return static_cast<uint32_t>(bits);
      };
      const int g = lane / 4, t = lane % 4;
      at(lane)->r[matrix] =
          at(lane)->transposed ? half(2 * t, g) | half(2 * t + 1, g) << 16 : half(g, 2 * t) | half(g, 2 * t + 1) << 16;
    }
  }
}

void multiply_for_warp(void* const* arguments, unsigned) {
  if (counting) [[unlikely]]
    count_product();
  const auto at = [&](int lane) { return static_cast<const Product*>(arguments[lane]); };
  float a[16][16], b[8][16];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Product& p = *at(lane);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int which = 0; which < 4; ++which) {
        a[g + 8 * (which % 2)][2 * t + half + 8 * (which / 2)] = element(p.a, which, half, p.to_float);
      }
      for (int which = 0; which < 2; ++which) b[g][2 * t + half + 8 * which] = element(p.b, which, half, p.to_float);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int which = 0; which < 4; ++which) {
      const int row = lane / 4 + 8 * (which / 2), column = 2 * (lane % 4) + which % 2;
      float sum = at(lane)->c[which];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
      at(lane)->c[which] = sum;
    }
  }
}

}  // namespace

void wait_for_previous_kernel() { current->waited_for_previous = true; }

void prefetch_to_l2(const void* p, const Where& where) {
  const Pause pause;
  check_prefetch(reinterpret_cast<uintptr_t>(p), where);
}

uint4 load_streaming(const void* p, const Where& where) {
  const Pause pause;
  check_aligned(p, "load_streaming", where);
  check_global(p, where);
  check_never_written(p, 16, where);
  if (counting) [[unlikely]]
    count_access(p, 16, Path::kUncached, where);
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}

void copy_async_16(void* shared, const void* global, bool valid, const Where& where) {
  const Pause pause;
  check_aligned(shared, "copy_async_16 to shared memory", where);
  if (valid) {
    check_aligned(global, "copy_async_16 from global memory", where);
    check_global(global, where);
  }
  start_copy(shared, 16, where);
  if (counting) [[unlikely]] {
    count_access(shared, 16, Path::kStore, where);
    count_access(global, valid ? 16 : 0, Path::kUncached, where);
  }
  current->copies.push_back({shared, valid ? global : nullptr});
  if (counting) [[unlikely]]
    count_copies(current->copies.size());
}

void commit_copies() {
  const Pause pause;
  Thread& me = *current;
  me.groups.push_back(me.copies.size() - std::accumulate(me.groups.begin(), me.groups.end(), size_t{0}));
}

void wait_for_copies(size_t pending, const Where& where) {
  const Pause pause;
  Thread& me = *current;
  if (counting && pending == 0) [[unlikely]]
    count_wait_for_copies();
  while (me.groups.size() > pending) {
    const size_t count = me.groups.front();
    for (size_t i = 0; i < count; ++i) {
      const AsyncCopy& copy = me.copies[i];
      finish_copy(copy.to, 16, where);
      if (copy.from)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
    }
    me.copies.erase(me.copies.begin(), me.copies.begin() + static_cast<ptrdiff_t>(count));
    me.groups.erase(me.groups.begin());
  }
}

void load_matrices(uint32_t (&r)[4], const void* row, bool transposed, const Where& where) {
  const Pause pause;
  check_aligned(row, "load_matrices", where);
  check_shared(row, where);
  if (counting) [[unlikely]]
    count_access(row, 16, Path::kLoad, where);
  Matrices mine{static_cast<const char*>(row), r, transposed};
  collective(transposed ? "load_matrices_transposed" : "load_matrices", kAll, &mine, load_for_warp, where);
}

void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*to_float)(uint16_t),
                  const Where& where) {
  Product mine{c, a, b, to_float};
  collective("multiply_add", kAll, &mine, multiply_for_warp, where);
}

}  // namespace specengine::sim
