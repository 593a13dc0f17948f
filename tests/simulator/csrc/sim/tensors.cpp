#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "sim/block.h"
#include "sim/blocks.h"
#include "sim/launch.h"
#include "sim/memory.h"

namespace specengine::sim {
namespace {

// Bytes of places for the words of tensors that a launch may write, mapped but unused. Words past them are not checked
// for races.
constexpr size_t kMostWords = size_t{1} << 20, kWordsToKeep = size_t{1} << 18;

struct Tensor {
  uintptr_t begin, end;
  const char* name;
  bool written;       // the launch was given a pointer to it that it may write through
  size_t first_byte;  // of its places
};

thread_local std::vector<Tensor> of_op;
thread_local const char* host_read = nullptr;

std::vector<Tensor> tensors;  // of the launch: those of the op in order, overlapping ones joined
Place* const words = static_cast<Place*>(map_memory(kMostWords * sizeof(Place)));
Place* const bytes_of_words = static_cast<Place*>(map_memory(4 * kMostWords * sizeof(Place)));
const Places places(words, bytes_of_words);
size_t words_used;
BlockOrder order;

bool has(const Tensor& t, uintptr_t at, size_t bytes) { return at >= t.begin && at + bytes <= t.end; }

const Tensor* find(uintptr_t at, size_t bytes) {
  static size_t last[2] = {0, 0};
  const size_t count = tensors.size();
  const Tensor* const all = tensors.data();
  for (size_t i : last) {
    if (i < count && has(all[i], at, bytes)) return &all[i];
  }
  size_t low = 0, high = count;  // low: how many begin at or before `at`
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (all[middle].begin <= at) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || !has(all[low - 1], at, bytes)) return nullptr;
  last[1] = last[0], last[0] = low - 1;
  return &all[low - 1];
}

// Its bytes matter to no kernel.
bool is_only_prefetched(const Tensor& t) { return std::strcmp(t.name, "upcoming") == 0; }

// Weights, which no kernel writes: they may be read before the wait for the previous one.
bool is_constant(const Tensor& t, Access access) {
  return std::strcmp(t.name, "weight") == 0 && !t.written && access == Access::kRead;
}

void touch_written(const Tensor& t, uintptr_t at, size_t bytes, Access access, const Site& site) {
  const Accessor me = accessor();
  // Before the places: an operation comes after those of other blocks on its address.
  if (is_atomic(access)) order.atomic(at, me);
  places.each(t.first_byte + (at - t.begin / 4 * 4), bytes, access, [&](Place& place) {
    if (const Conflict c = conflict_in_block(place, access, me); c.did) {
      race(c, "__syncthreads or __syncwarp", at, bytes, access, site, relative_to_tensors(at));
    }
    if (const Conflict c = order.conflict(place, access, me); c.did) {
      race(c, "__threadfence, atomic operation and barrier", at, bytes, access, site, relative_to_tensors(at));
    }
    place.record(access, me);
  });
}

}  // namespace

uint64_t prefetched_lines = 0;

void begin_op() { of_op.clear(), host_read = nullptr; }

void note_tensor(const TensorView& t, const char* name) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data);
  const uintptr_t bytes = static_cast<uintptr_t>(bytes_of(t));
  if (bytes > 0) of_op.push_back({begin, begin + bytes, name, false, 0});
}

void check_host_read(const void* place) {
  for (const Tensor& t : of_op) {
    if (has(t, reinterpret_cast<uintptr_t>(place), 1)) host_read = t.name;
  }
}
const char* read_by_host() { return host_read; }

void begin_tensors(const std::vector<const void*>& written) {
  if (words_used > kWordsToKeep) {
    madvise(words, words_used * sizeof(Place), MADV_DONTNEED);
    madvise(bytes_of_words, 4 * words_used * sizeof(Place), MADV_DONTNEED);
  }
  words_used = 0;
  tensors.clear();
  std::sort(of_op.begin(), of_op.end(), [](const Tensor& a, const Tensor& b) { return a.begin < b.begin; });
  for (const Tensor& t : of_op) {
    if (!tensors.empty() && t.begin < tensors.back().end) {
      tensors.back().end = std::max(tensors.back().end, t.end);
    } else {
      tensors.push_back(t);
    }
  }
  for (Tensor& t : tensors) {
    const size_t needed = (t.end - t.begin / 4 * 4 + 3) / 4;
    const bool named = std::any_of(written.begin(), written.end(),
                                   [&](const void* p) { return has(t, reinterpret_cast<uintptr_t>(p), 1); });
    t.written = named && words_used + needed <= kMostWords && !is_only_prefetched(t);
    if (t.written) t.first_byte = 4 * words_used, words_used += needed;
  }
  order.begin_launch(epoch);
}

std::vector<TensorPlace> tensor_places() {
  std::vector<TensorPlace> places;
  for (const Tensor& t : tensors) places.push_back({t.begin, t.end, t.name});
  return places;
}

bool counters_are_zero() {
  const auto zero = [](const Tensor& t) {
    const char *const from = reinterpret_cast<const char*>(t.begin), *const to = reinterpret_cast<const char*>(t.end);
    return std::all_of(from, to, [](char byte) { return byte == 0; });
  };
  return std::all_of(of_op.begin(), of_op.end(),
                     [&](const Tensor& t) { return std::strcmp(t.name, "arrived") != 0 || zero(t); });
}

void begin_block_of_tensors() { order.begin_block(epoch); }

bool touch_tensor(uintptr_t at, size_t bytes, Access access, const Site& site) {
  const Tensor* const t = find(at, bytes);
  if (t == nullptr) return false;
  if (!current->waited_for_previous && !is_constant(*t, access)) {
    finding(text_of_access("", access, bytes) + " " + relative_to_tensors(at) + " before wait_for_previous_kernel()",
            site);
  }
  if (t->written) touch_written(*t, at, bytes, access, site);
  return true;
}

void check_prefetch(uintptr_t at, const Site& site) {
  if (find(at, 1) == nullptr) finding("prefetch " + relative_to_tensors(at), site);
  ++prefetched_lines;
}

std::string relative_to_tensors(uintptr_t at) {
  const Tensor* nearest = nullptr;
  uintptr_t least = UINTPTR_MAX;
  for (const Tensor& t : tensors) {
    const uintptr_t distance = at < t.begin ? t.begin - at : at >= t.end ? at - t.end + 1 : 0;
    if (distance < least) least = distance, nearest = &t;
  }
  return nearest ? text_of_distance(at, nearest->begin, nearest->end, nearest->name) : "of no tensor";
}

void check_never_written(const void* place, size_t bytes, const Site& site) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(place);
  const Tensor* const t = find(at, bytes);
  if (t == nullptr || !t->written) return;
  places.each(t->first_byte + (at - t->begin / 4 * 4), bytes, Access::kRead, [&](const Place& p) {
    if (order.of_this_launch(p.writes) || order.of_this_launch(p.atomics)) {
      finding("a load for constant memory " + relative_to_tensors(at) + ", which this launch has written", site);
    }
  });
}

std::string name_of_block_in(uint32_t epoch) { return name_of_block(order.block_at(epoch)); }

void note_fence() { order.fence(accessor()); }

}  // namespace specengine::sim
