#include "sim/memory.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "sim/block.h"
#include "sim/launch.h"

namespace specengine::sim {
namespace {

struct Range {
  uintptr_t begin, end;
  bool writable;
  const char* name;
};

// Where an access was made: known as an instruction or as a line of the source.
struct Site {
  const void* instruction;
  const std::source_location* where;
};

constexpr size_t kRedZone = 64, kSharedBytes = 227 * 1024, kStaticBytes = 48 * 1024;
constexpr size_t kArenaBytes = 2 * kSharedBytes;

struct SharedArray {
  size_t begin, end;  // offsets in the arena
  const char* name;
};

thread_local std::vector<Range> op_tensors;

std::vector<Range> tensors;  // of the launch: op_tensors sorted, overlapping ones joined
Range others[8];             // parameters and segments of this module
int other_count;
SharedArray arrays[64];
int array_count;
size_t arena_used, declared_bytes, dynamic_bytes;
unsigned launches;
uint32_t now = 1, block_start = 1;  // the epoch, and that in which the block started

char* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(memory);
}

char* const arena = map(kArenaBytes);
Place* const words = reinterpret_cast<Place*>(map(kArenaBytes / 4 * sizeof(Place)));
Place* const bytes_of_words = reinterpret_cast<Place*>(map(kArenaBytes * sizeof(Place)));

const char* verb(Access access) {
  return access == Access::kRead ? "read" : access == Access::kWrite ? "write" : "atomic operation";
}

[[noreturn]] void report(const std::string& text, const Site& site) {
  if (site.where) finding(text, *site.where);
  finding(text, site.instruction);
}

std::string of_bytes(const char* what, Access access, size_t bytes) {
  return std::string(what) + verb(access) + " of " + std::to_string(bytes) + " bytes";
}

// Where an address lies, seen from the nearest of some ranges.
template <typename Ranges>
std::string relative_to(uintptr_t at, const Ranges& ranges, size_t count) {
  std::string text;
  uintptr_t nearest = UINTPTR_MAX;
  for (size_t i = 0; i < count; ++i) {
    const uintptr_t begin = ranges[i].begin, end = ranges[i].end, size = end - begin;
    const uintptr_t distance = at < begin ? begin - at : at >= end ? at - end : 0;
    if (distance >= nearest) continue;
    nearest = distance;
    const std::string name = std::string(ranges[i].name) + " (" + std::to_string(size) + " bytes)";
    text = at < begin  ? std::to_string(distance) + " bytes before " + name
           : at >= end ? std::to_string(distance) + " bytes after the end of " + name
                       : "at byte " + std::to_string(at - begin) + " of " + name;
  }
  return text;
}

void report_race(int other, const char* other_verb, Access access, size_t bytes, uintptr_t at, const Site& site) {
  report(of_bytes("race: ", access, bytes) + " of shared memory " + relative_to(at, arrays, array_count) + ", which " +
             name_of_thread(other) + " " + other_verb + ", with no __syncthreads or __syncwarp between",
         site);
}

enum class Copy { kNone, kStart, kFinish };

void touch(Place& place, Access access, Copy copy, const Accessor& me, size_t bytes, uintptr_t at, const Site& site) {
  const auto where = [&] { return " shared memory " + relative_to(at, arrays, array_count); };
  const bool initialises = access == Access::kWrite || access == Access::kAtomicInitialise;
  if (!initialises && place.block != block_start) {
    report(of_bytes("", access, bytes) + " of uninitialised" + where(), site);
  }
  if (place.block == block_start && place.copying && copy != Copy::kFinish) {
    report(of_bytes("", access, bytes) + " of" + where() + ", which an asynchronous copy not yet waited for writes",
           site);
  }
  const bool atomic = access == Access::kAtomic || access == Access::kAtomicInitialise;
  int other = place.writes.unordered(me);
  if (other >= 0) report_race(other, "has written", access, bytes, at, site);
  if (!atomic && (other = place.atomics.unordered(me)) >= 0) {
    report_race(other, "has changed by an atomic operation", access, bytes, at, site);
  }
  if (access == Access::kRead) return place.reads.add(me);
  if ((other = place.reads.unordered(me)) >= 0) report_race(other, "has read", access, bytes, at, site);
  place.block = block_start, place.copying = copy == Copy::kStart;
  if (atomic) return place.atomics.add(me);
  // A later access that is ordered after this write is ordered after all before it.
  place.reads = place.atomics = place.writes = {};
  place.writes.add(me);
}

void touch_shared(size_t offset, size_t bytes, Access access, Copy copy, const Site& site) {
  const uintptr_t at = offset;
  bool inside = false;
  for (int i = 0; i < array_count && !inside; ++i) {
    inside = offset >= arrays[i].begin && offset + bytes <= arrays[i].end;
  }
  if (!inside) {
    report(of_bytes("out-of-bounds ", access, bytes) + " of shared memory, " + relative_to(at, arrays, array_count),
           site);
  }
  const Accessor me = accessor();
  for (size_t w = offset / 4; 4 * w < offset + bytes; ++w) {
    Place& word = words[w];
    const size_t from = std::max(offset, 4 * w), to = std::min(offset + bytes, 4 * w + 4);
    if (to - from == 4 && !word.in_bytes) {
      touch(word, access, copy, me, bytes, at, site);
      continue;
    }
    Place* const parts = bytes_of_words + 4 * w;
    if (!word.in_bytes) {
      word.in_bytes = true;
      std::fill(parts, parts + 4, word);
    }
    for (size_t b = from; b < to; ++b) touch(bytes_of_words[b], access, copy, me, bytes, at, site);
    if (to - from == 4 && access == Access::kWrite) word = parts[0], word.in_bytes = false;
  }
}

bool in(const Range& range, uintptr_t at, size_t bytes) { return at >= range.begin && at + bytes <= range.end; }

const Range* tensor_at(uintptr_t at, size_t bytes) {
  static size_t last[2] = {0, 0};
  const size_t count = tensors.size();
  const Range* const all = tensors.data();
  for (size_t i : last) {
    if (i < count && in(all[i], at, bytes)) return &all[i];
  }
  size_t low = 0, high = count;  // the last one that begins at or before `at`
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (all[middle].begin <= at)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0 || !in(all[low - 1], at, bytes)) return nullptr;
  last[1] = last[0], last[0] = low - 1;
  return &all[low - 1];
}

// Inside a Pause: the simulator's own accesses must not come back here.
void touch_memory(const void* place, size_t bytes, Access access, const Site& site) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(place), offset = at - reinterpret_cast<uintptr_t>(arena);
  if (offset < kArenaBytes) return touch_shared(offset, bytes, access, Copy::kNone, site);
  if (current->fibre.owns(at)) return;
  if (tensor_at(at, bytes)) {
    if (current->waited_for_previous) return;
    report(of_bytes("", access, bytes) + " of a tensor before wait_for_previous_kernel()", site);
  }
  for (int i = 0; i < other_count; ++i) {
    if (in(others[i], at, bytes) && (others[i].writable || access == Access::kRead)) return;
  }
  std::string near = relative_to(at, tensors, tensors.size());
  report(of_bytes("out-of-bounds ", access, bytes) + (near.empty() ? "" : ", " + near), site);
}

void check(const void* place, size_t bytes, Access access, const Site& site) {
  if (!in_kernel || bytes == 0) return;
  const Pause pause;
  touch_memory(place, bytes, access, site);
}

void check(const void* place, size_t bytes, Access access, const void* instruction) {
  check(place, bytes, access, Site{instruction, nullptr});
}

int add_segments(dl_phdr_info* module, size_t, void*) {
  const uintptr_t own = reinterpret_cast<uintptr_t>(&launches);
  bool ours = false;
  for (int i = 0; i < module->dlpi_phnum; ++i) {
    const auto& segment = module->dlpi_phdr[i];
    const uintptr_t begin = module->dlpi_addr + segment.p_vaddr;
    ours |= segment.p_type == PT_LOAD && own >= begin && own < begin + segment.p_memsz;
  }
  if (!ours) return 0;
  for (int i = 0; i < module->dlpi_phnum && other_count < 8; ++i) {
    const auto& segment = module->dlpi_phdr[i];
    const uintptr_t begin = module->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD) {
      others[other_count++] = {begin, begin + segment.p_memsz, (segment.p_flags & PF_W) != 0, "module"};
    }
  }
  return 1;
}

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kInt64:
      return 8;
    default:
      return 1;
  }
}

size_t new_array(size_t bytes, size_t alignment, const char* name) {
  // Aligned as asked and no better, so that whoever needs more is found out.
  size_t begin = (arena_used + kRedZone + alignment - 1) / alignment * alignment;
  if (begin % (2 * alignment) == 0) begin += alignment;
  arena_used = begin + bytes;
  arrays[array_count++] = {begin, begin + bytes, name};
  return begin;
}

}  // namespace

void begin_op() { op_tensors.clear(); }

void note_tensor(const TensorView& t, const char* name) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data);
  const uintptr_t bytes = static_cast<uintptr_t>(t.numel() * bytes_of(t.dtype));
  if (bytes > 0) op_tensors.push_back({begin, begin + bytes, true, name});
}

void begin_launch(const void* params, size_t params_bytes, size_t dynamic_shared_bytes) {
  tensors.clear();
  std::sort(op_tensors.begin(), op_tensors.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (const Range& range : op_tensors) {
    if (!tensors.empty() && range.begin < tensors.back().end) {
      tensors.back().end = std::max(tensors.back().end, range.end);
    } else {
      tensors.push_back(range);
    }
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(params);
  others[0] = {begin, begin + params_bytes, false, "parameters"};
  if (other_count == 0) {
    other_count = 1;
    dl_iterate_phdr(add_segments, nullptr);
  }
  ++launches;
  array_count = 0, arena_used = 0;
  dynamic_bytes = declared_bytes = dynamic_shared_bytes;
  if (dynamic_bytes > 0) new_array(dynamic_bytes, 16, "dynamic shared memory");
}

void begin_block() { block_start = ++now; }
void begin_epoch() { ++now; }
uint32_t epoch() { return now; }

void check_atomic(const void* place, size_t bytes, bool initialises, const void* instruction) {
  check(place, bytes, initialises ? Access::kAtomicInitialise : Access::kAtomic, instruction);
}

namespace {

size_t offset_of(const void* place, const Site& site) {
  const size_t offset = static_cast<size_t>(static_cast<const char*>(place) - arena);
  if (offset >= kArenaBytes) report("an address that is not in shared memory", site);
  return offset;
}

}  // namespace

void check_shared_read(const void* place, size_t bytes, const std::source_location& where) {
  const Pause pause;
  const Site site{nullptr, &where};
  touch_shared(offset_of(place, site), bytes, Access::kRead, Copy::kNone, site);
}

void check_global_read(const void* place, size_t bytes, const std::source_location& where) {
  const Pause pause;
  const Site site{nullptr, &where};
  if (static_cast<size_t>(static_cast<const char*>(place) - arena) < kArenaBytes) {
    report("a shared address where a global one is needed", site);
  }
  touch_memory(place, bytes, Access::kRead, site);
}

void start_copy(const void* place, size_t bytes, const std::source_location& where) {
  const Pause pause;
  const Site site{nullptr, &where};
  touch_shared(offset_of(place, site), bytes, Access::kWrite, Copy::kStart, site);
}

void finish_copy(const void* place, size_t bytes, const std::source_location& where) {
  const Pause pause;
  const Site site{nullptr, &where};
  touch_shared(offset_of(place, site), bytes, Access::kWrite, Copy::kFinish, site);
}

void* shared_memory(SharedSite& site, size_t bytes, size_t alignment, const char* name) {
  const Pause pause;
  if (site.launch != launches) {
    const auto here = std::source_location::current();
    declared_bytes += bytes;
    if (declared_bytes - dynamic_bytes > kStaticBytes || declared_bytes > kSharedBytes || array_count == 64) {
      finding("shared memory: " + std::to_string(declared_bytes - dynamic_bytes) + " bytes declared (" + name +
                  " is the last) and " + std::to_string(dynamic_bytes) +
                  " dynamic ones are more than 48 KiB and 227 KiB together",
              here);
    }
    site.launch = launches, site.offset = new_array(bytes, alignment, name);
  }
  return arena + site.offset;
}

void* dynamic_shared_memory() { return arena + (dynamic_bytes > 0 ? arrays[0].begin : 0); }

namespace {

// What GCC passes to the functions at the end begins with it; it calls them where behaviour would be undefined.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

[[noreturn]] void undefined(const std::string& text, const SourceLocation& at) {
  const char* slash = std::strrchr(at.file, '/');
  finding(text + " at " + (slash ? slash + 1 : at.file) + ":" + std::to_string(at.line), nullptr);
}

}  // namespace
}  // namespace specengine::sim

using specengine::sim::Access;

#define SPECENGINE_SIM_HOOK(name, access, bytes)                                       \
  extern "C" void __tsan_##name(void* place) {                                         \
    specengine::sim::check(place, bytes, Access::access, __builtin_return_address(0)); \
  }
#define SPECENGINE_SIM_HOOKS(bytes)                        \
  SPECENGINE_SIM_HOOK(read##bytes, kRead, bytes)           \
  SPECENGINE_SIM_HOOK(write##bytes, kWrite, bytes)         \
  SPECENGINE_SIM_HOOK(unaligned_read##bytes, kRead, bytes) \
  SPECENGINE_SIM_HOOK(unaligned_write##bytes, kWrite, bytes)
SPECENGINE_SIM_HOOKS(1)
SPECENGINE_SIM_HOOKS(2)
SPECENGINE_SIM_HOOKS(4)
SPECENGINE_SIM_HOOKS(8)
SPECENGINE_SIM_HOOKS(16)

extern "C" {
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* place, size_t bytes) {
  specengine::sim::check(place, bytes, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* place, size_t bytes) {
  specengine::sim::check(place, bytes, Access::kWrite, __builtin_return_address(0));
}

// The linker sends this module's memcpy, memmove and memset here (--wrap).
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  specengine::sim::check(from, bytes, Access::kRead, __builtin_return_address(0));
  specengine::sim::check(to, bytes, Access::kWrite, __builtin_return_address(0));
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  specengine::sim::check(from, bytes, Access::kRead, __builtin_return_address(0));
  specengine::sim::check(to, bytes, Access::kWrite, __builtin_return_address(0));
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  specengine::sim::check(to, bytes, Access::kWrite, __builtin_return_address(0));
  return __real_memset(to, value, bytes);
}

#define SPECENGINE_SIM_UNDEFINED(text)     \
  if (!specengine::sim::in_kernel) return; \
  const specengine::sim::Pause pause;      \
  specengine::sim::undefined(text, *at)
void __ubsan_handle_type_mismatch_v1(const specengine::sim::SourceLocation* at, uintptr_t place) {
  SPECENGINE_SIM_UNDEFINED("misaligned access: the address ends in " + std::to_string(place % 16) + " of 16");
}
void __ubsan_handle_out_of_bounds(const specengine::sim::SourceLocation* at, intptr_t index) {
  SPECENGINE_SIM_UNDEFINED("index " + std::to_string(index) + " is outside its array");
}
void __ubsan_handle_shift_out_of_bounds(const specengine::sim::SourceLocation* at, uintptr_t, intptr_t by) {
  SPECENGINE_SIM_UNDEFINED("shift by " + std::to_string(by) + " bits");
}
void __ubsan_handle_divrem_overflow(const specengine::sim::SourceLocation* at, uintptr_t, uintptr_t) {
  SPECENGINE_SIM_UNDEFINED("division by zero");
}
}
