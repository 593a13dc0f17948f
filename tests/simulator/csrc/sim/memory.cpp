#include "sim/memory.h"

#include <link.h>
#include <sys/mman.h>

#include <cstring>
#include <new>

#include "sim/block.h"
#include "sim/counters.h"

namespace specengine::sim {
namespace {

struct Range {
  uintptr_t begin, end;
  bool writable;
};

// More accesses between two waits than any kernel makes that ends.
constexpr uint32_t kMostSteps = 1u << 26;

struct Unsettled {
  size_t bytes;
  const void* at;
  unsigned char before[16];
  std::string text;
  const void* instruction;
};

Unsettled unsettled;
Range params;
std::vector<Range> segments;  // of this module

bool in(const Range& range, uintptr_t at, size_t bytes, Access access) {
  return at >= range.begin && at + bytes <= range.end && (range.writable || access == Access::kRead);
}

int find_segments(dl_phdr_info* module, size_t, void*) {
  const uintptr_t own = reinterpret_cast<uintptr_t>(&params);
  segments.clear();
  bool ours = false;
  for (int i = 0; i < module->dlpi_phnum; ++i) {
    const auto& segment = module->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t begin = module->dlpi_addr + segment.p_vaddr;
    segments.push_back({begin, begin + segment.p_memsz, (segment.p_flags & PF_W) != 0});
    ours |= in(segments.back(), own, 1, Access::kRead);
  }
  return ours;  // ends the walk over the modules
}

}  // namespace

bool unsettled_write = false;

void touch_memory(uintptr_t at, size_t bytes, Access access, const Site& site) {
  if (unsettled_write) settle_write();
  if (++current->steps > kMostSteps) {
    finding("no end in sight: does it wait for a thread or block that cannot run meanwhile?", site);
  }
  if (is_shared(at)) return touch_shared(at, bytes, access, site);
  if (current->fibre.owns(at) || touch_tensor(at, bytes, access, site) || in(params, at, bytes, access)) return;
  for (const Range& segment : segments) {
    if (in(segment, at, bytes, access)) return;
  }
  finding(text_of_access("out-of-bounds ", access, bytes) + ", " + relative_to_tensors(at), site);
}

void race(const Conflict& conflict, const char* between, uintptr_t at, size_t bytes, Access access, const Site& site,
          const std::string& place) {
  const std::string block = conflict.epoch < first_epoch_of_block ? name_of_block_in(conflict.epoch) + " " : "";
  std::string text = text_of_access("race: ", access, bytes) + " " + place + ", which " + block +
                     name_of_thread(conflict.thread) + " " + conflict.did + ", with no " + between + " between";
  const bool both_write = access == Access::kWrite && conflict.kind == Access::kWrite;
  if (!both_write || bytes > sizeof(unsettled.before) || site.instruction == nullptr) finding(text, site);
  unsettled_write = true, unsettled.bytes = bytes, unsettled.at = reinterpret_cast<const void*>(at);
  unsettled.text = std::move(text), unsettled.instruction = site.instruction;
  std::memcpy(unsettled.before, unsettled.at, bytes);
}

void settle_write() {
  unsettled_write = false;
  if (std::memcmp(unsettled.before, unsettled.at, unsettled.bytes) != 0) {
    finding(unsettled.text, unsettled.instruction);
  }
}

void check(const void* place, size_t bytes, Access access, const Site& site) {
  if (!in_launch) return check_host_read(place);
  if (!in_kernel || bytes == 0) return;
  const Pause pause;
  touch_memory(reinterpret_cast<uintptr_t>(place), bytes, access, site);
  if (counting) [[unlikely]]
    count_plain(place, bytes, access, site);
}

void begin_launch(const void* p, size_t params_bytes, const std::vector<const void*>& written,
                  size_t dynamic_shared_bytes) {
  if (segments.empty()) dl_iterate_phdr(find_segments, nullptr);
  params = {reinterpret_cast<uintptr_t>(p), reinterpret_cast<uintptr_t>(p) + params_bytes, false};
  ++epoch;
  unsettled_write = false;
  begin_shared(dynamic_shared_bytes);
  begin_tensors(written);
}

void begin_block() {
  first_epoch_of_block = ++epoch;
  begin_block_of_tensors();
}

void begin_epoch() { ++epoch; }

std::string text_of_access(const char* what, Access access, size_t bytes) {
  const char* const name = access == Access::kRead ? "read" : is_atomic(access) ? "atomic operation" : "write";
  return std::string(what) + name + " of " + std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
}

std::string text_of_distance(uintptr_t at, uintptr_t begin, uintptr_t end, const char* name) {
  const std::string whole = std::string(name) + " (" + std::to_string(end - begin) + " bytes)";
  if (at < begin) return std::to_string(begin - at) + " bytes before " + whole;
  if (at >= end) return std::to_string(at - end) + " bytes after the end of " + whole;
  return "at byte " + std::to_string(at - begin) + " of " + whole;
}

void* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

}  // namespace specengine::sim
