#include "sim/block.h"
#include "sim/counters.h"
#include "sim/launch.h"
#include "sim/memory.h"

namespace specengine::sim {
namespace {

constexpr size_t kRedZone = 64, kMostArrays = 64;
constexpr size_t kArenaBytes = kSharedBytes + kMostArrays * 4 * kRedZone;

struct SharedArray {
  size_t begin, end;  // in the arena
  const char* name;
};

char* const arena = static_cast<char*>(map_memory(kArenaBytes));
const Places places(static_cast<Place*>(map_memory(kArenaBytes / 4 * sizeof(Place))),
                    static_cast<Place*>(map_memory(kArenaBytes * sizeof(Place))));
SharedArray arrays[kMostArrays];
size_t array_count, arena_used, declared_bytes, dynamic_bytes;
unsigned launches;

enum class Copy { kNone, kStart, kFinish };

// With the requested alignment and no more, so that a kernel that needs more is found.
size_t new_array(size_t bytes, size_t alignment, const char* name) {
  size_t begin = (arena_used + kRedZone + alignment - 1) / alignment * alignment;
  if (begin % (2 * alignment) == 0) begin += alignment;
  arena_used = begin + bytes;
  arrays[array_count++] = {begin, arena_used, name};
  return begin;
}

std::string nearest_array(size_t offset) {
  const SharedArray* nearest = nullptr;
  size_t least = SIZE_MAX;
  for (size_t i = 0; i < array_count; ++i) {
    const SharedArray& a = arrays[i];
    const size_t distance = offset < a.begin ? a.begin - offset : offset >= a.end ? offset - a.end + 1 : 0;
    if (distance < least) least = distance, nearest = &a;
  }
  return nearest ? text_of_distance(offset, nearest->begin, nearest->end, nearest->name) : "of which there is none";
}

void touch(size_t offset, size_t bytes, Access access, Copy copy, const Site& site) {
  bool inside = false;
  for (size_t i = 0; i < array_count && !inside; ++i) {
    inside = offset >= arrays[i].begin && offset + bytes <= arrays[i].end;
  }
  if (!inside) {
    finding(text_of_access("out-of-bounds ", access, bytes) + " of shared memory, " + nearest_array(offset), site);
  }
  const Accessor me = accessor();
  places.each(offset, bytes, access, [&](Place& place) {
    const bool written = place.block == me.block_start;
    if (!written && (access == Access::kRead || access == Access::kAtomic)) {
      finding(text_of_access("", access, bytes) + " of uninitialised shared memory " + nearest_array(offset), site);
    }
    if (written && place.copying && copy != Copy::kFinish) {
      finding(text_of_access("", access, bytes) + " of shared memory " + nearest_array(offset) +
                  ", which an asynchronous copy not yet waited for writes",
              site);
    }
    if (const Conflict c = conflict_in_block(place, access, me); c.did) {
      race(c, "__syncthreads or __syncwarp", reinterpret_cast<uintptr_t>(arena) + offset, bytes, access, site,
           "of shared memory " + nearest_array(offset));
    }
    place.record(access, me);
    if (access != Access::kRead) place.block = me.block_start, place.copying = copy == Copy::kStart;
  });
}

size_t offset_of(const void* place, const Site& site) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(place);
  if (!is_shared(at)) finding("an address that is not in shared memory", site);
  return at - reinterpret_cast<uintptr_t>(arena);
}

}  // namespace

bool is_shared(uintptr_t at) { return at - reinterpret_cast<uintptr_t>(arena) < kArenaBytes; }

void touch_shared(uintptr_t at, size_t bytes, Access access, const Site& site) {
  touch(at - reinterpret_cast<uintptr_t>(arena), bytes, access, Copy::kNone, site);
}

void start_copy(const void* to, size_t bytes, const Site& site) {
  touch(offset_of(to, site), bytes, Access::kWrite, Copy::kStart, site);
}

void finish_copy(const void* to, size_t bytes, const Site& site) {
  touch(offset_of(to, site), bytes, Access::kWrite, Copy::kFinish, site);
}

void begin_shared(size_t bytes) {
  ++launches;
  array_count = 0, arena_used = 0, declared_bytes = dynamic_bytes = bytes;
  if (bytes > 0) new_array(bytes, 16, "dynamic shared memory");
}

void* shared_memory(SharedSite& site, size_t bytes, size_t alignment, const char* name) {
  const Pause pause;
  if (site.launch != launches) {
    declared_bytes += bytes;
    if (declared_bytes - dynamic_bytes > kStaticSharedBytes || declared_bytes > kSharedBytes ||
        array_count == kMostArrays) {
      finding("shared memory: with " + std::string(name) + ", " + std::to_string(declared_bytes - dynamic_bytes) +
                  " bytes are declared, more than 48 KiB or, with " + std::to_string(dynamic_bytes) +
                  " dynamic ones, than 227 KiB",
              Site(nullptr));
    }
    site.launch = launches, site.offset = new_array(bytes, alignment, name);
  }
  return arena + site.offset;
}

size_t static_shared_bytes() { return declared_bytes - dynamic_bytes; }

void* dynamic_shared_memory() { return arena + (dynamic_bytes > 0 ? arrays[0].begin : 0); }

}  // namespace specengine::sim
