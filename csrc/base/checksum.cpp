// Fletcher's sums in 64 bits: in a part of the data, four lanes each sum their words, and their sums; the parts' sums
// are mixed in order. Threads share the parts.
#include "base/checksum.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/thread_pool.h"

namespace specengine {
namespace {

constexpr int64_t kPart = 1 << 20;
constexpr int kLanes = 4;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2^64 / the golden ratio

uint64_t mix(uint64_t state, uint64_t next) { return (state ^ state >> 29) * kOdd + next; }

uint64_t sum_part(const uint8_t* data, int64_t size) {
  uint64_t sums[kLanes] = {}, sums_of_sums[kLanes] = {}, words[kLanes];
  int64_t at = 0;
  const auto add = [&] {
    for (int i = 0; i < kLanes; ++i) sums[i] += words[i], sums_of_sums[i] += sums[i];
  };
  for (; at + static_cast<int64_t>(sizeof(words)) <= size; at += sizeof(words)) {
    std::memcpy(words, data + at, sizeof(words));
    add();
  }
  std::memset(words, 0, sizeof(words));
  std::memcpy(words, data + at, static_cast<size_t>(size - at));
  add();
  uint64_t state = static_cast<uint64_t>(size);
  for (int i = 0; i < kLanes; ++i) state = mix(mix(state, sums[i]), sums_of_sums[i]);
  return state;
}

struct Job {
  const uint8_t* data;
  int64_t size;
  std::vector<uint64_t> parts;
};

}  // namespace

uint64_t checksum(const uint8_t* data, int64_t size) {
  Job job{data, size, std::vector<uint64_t>(static_cast<size_t>((size + kPart - 1) / kPart))};
  run_parallel(
      static_cast<int64_t>(job.parts.size()),
      [](void* context, int64_t i) {
        Job& own = *static_cast<Job*>(context);
        own.parts[static_cast<size_t>(i)] = sum_part(own.data + i * kPart, std::min(kPart, own.size - i * kPart));
      },
      &job);
  uint64_t state = static_cast<uint64_t>(size);
  for (uint64_t part : job.parts) state = mix(state, part);
  return mix(state, 0);
}

}  // namespace specengine
