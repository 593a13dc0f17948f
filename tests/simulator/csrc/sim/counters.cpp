#include "sim/counters.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <unordered_map>

#include "sim/block.h"

namespace specengine::sim {

bool counting = false;

namespace {

constexpr size_t kSector = 32, kBankBytes = 4, kBanks = 32;
constexpr const char* kNames[] = {"load", "uncached", "store", "atomic"};
constexpr size_t kPaths = std::size(kNames);

struct Lane {
  uintptr_t at;
  uint32_t bytes;
};

struct Request {
  std::array<Lane, kLanes> lanes{};
};

// The requests of one instruction that may still get lanes, and how many each lane has joined.
struct Instruction {
  Path path;
  std::array<uint32_t, kLanes> joined{};
  std::vector<Request> open;
};

// One tensor on one path.
struct Touched {
  Traffic traffic;
  std::vector<uint64_t> bytes;   // a bit each
  std::vector<uint32_t> blocks;  // of each sector: the last block that touched it
};

struct Counted {
  TensorPlace place;
  std::array<std::unique_ptr<Touched>, kPaths> paths;
};

struct Waiter {
  bool loaded = false;
  size_t slowest = 0;            // of the loads since the last wait
  size_t copied = SIZE_MAX;      // the tensor of copies under way
  std::vector<uint64_t> rounds;  // by tensor
};

std::vector<LaunchCounts> launches;
LaunchCounts launch_counts;
std::vector<Counted> tensors;
std::unordered_map<uint64_t, Instruction> open[kMaxThreads / kLanes];
std::vector<Waiter> waiters;
std::vector<uint64_t> most_rounds;
uint32_t block;
int warps_of_block;

uint64_t key_of(const Site& site) {
  if (site.where == nullptr) return reinterpret_cast<uintptr_t>(site.instruction);
  return reinterpret_cast<uintptr_t>(site.where->file_name()) ^ uint64_t { site.where->line() } << 44 ^
         uint64_t { site.where->column() } << 34;
}

// SIZE_MAX: no tensor, such as the launch's parameters or a constant.
size_t tensor_at(uintptr_t at, size_t bytes) {
  static size_t last = 0;
  const auto has = [&](size_t i) { return at >= tensors[i].place.begin && at + bytes <= tensors[i].place.end; };
  if (last < tensors.size() && has(last)) return last;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (has(i)) return last = i;
  }
  return SIZE_MAX;
}

Touched& touched(size_t tensor, Path path) {
  auto& found = tensors[tensor].paths[static_cast<size_t>(path)];
  if (!found) {
    const TensorPlace& place = tensors[tensor].place;
    found = std::make_unique<Touched>();
    found->bytes.resize((place.end - place.begin) / 64 + 1);
    found->blocks.resize((place.end - place.begin) / kSector + 1);
  }
  return *found;
}

void mark(Touched& t, size_t offset, size_t bytes) {
  for (size_t i = offset; i < offset + bytes; ++i) {
    uint64_t& word = t.bytes[i / 64];
    t.traffic.unique_bytes += ~(word >> (i % 64)) & 1;
    word |= uint64_t{1} << (i % 64);
  }
}

// Sectors begin where the tensor begins, as on a GPU, whose allocator aligns to 512 bytes.
void finish_global(const Request& request, Path path) {
  size_t tensor = SIZE_MAX;
  std::array<size_t, kLanes * 2> sectors;  // 16 bytes that are not aligned touch two
  size_t count = 0;
  for (const Lane& lane : request.lanes) {
    if (lane.bytes == 0) continue;
    if (tensor == SIZE_MAX) tensor = tensor_at(lane.at, lane.bytes);
    const TensorPlace& place = tensors[tensor].place;
    if (lane.at < place.begin || lane.at >= place.end) continue;
    Touched& t = touched(tensor, path);
    const size_t offset = lane.at - place.begin;
    t.traffic.bytes += lane.bytes;
    mark(t, offset, lane.bytes);
    for (size_t s = offset / kSector; s <= (offset + lane.bytes - 1) / kSector; ++s) sectors.at(count++) = s;
  }
  if (tensor == SIZE_MAX) return;
  Touched& t = touched(tensor, path);
  std::sort(sectors.begin(), sectors.begin() + static_cast<ptrdiff_t>(count));
  const auto end = std::unique(sectors.begin(), sectors.begin() + static_cast<ptrdiff_t>(count));
  ++t.traffic.requests, t.traffic.sectors += static_cast<uint64_t>(end - sectors.begin());
  for (auto s = sectors.begin(); s != end; ++s) {
    uint32_t& last = t.blocks[*s];
    t.traffic.block_sectors += last != block, last = block;
  }
}

// Lanes take turns by halves or quarters of the warp where each has 8 or 16 bytes. In a turn a bank gives one word.
void finish_shared(const Request& request) {
  uint32_t widest = 0;
  for (const Lane& lane : request.lanes) widest = std::max(widest, lane.bytes);
  const size_t at_once = widest <= 4 ? kLanes : widest <= 8 ? kLanes / 2 : kLanes / 4;
  ++launch_counts.shared.requests;
  for (size_t first = 0; first < kLanes; first += at_once) {
    std::array<std::vector<uintptr_t>, kBanks> words;
    size_t distinct = 0, most = 0;
    for (size_t lane = first; lane < first + at_once; ++lane) {
      const auto [at, bytes] = request.lanes[lane];
      if (bytes == 0) continue;
      for (uintptr_t word = at / kBankBytes; word <= (at + bytes - 1) / kBankBytes; ++word) {
        auto& of_bank = words[word % kBanks];
        if (std::find(of_bank.begin(), of_bank.end(), word) != of_bank.end()) continue;
        of_bank.push_back(word);
        ++distinct, most = std::max(most, of_bank.size());
      }
    }
    launch_counts.shared.wavefronts += most, launch_counts.shared.least += (distinct + kBanks - 1) / kBanks;
  }
}

}  // namespace

void set_counting(bool on) {
  counting = on;
  launches.clear();
}

const std::vector<LaunchCounts>& counted() { return launches; }

void count_launch(const LaunchConfig& config, const void* kernel) {
  Dl_info module{};
  dladdr(kernel, &module);
  launch_counts = {};
  launch_counts.op = config.name;
  launch_counts.kernel = reinterpret_cast<uintptr_t>(kernel) - reinterpret_cast<uintptr_t>(module.dli_fbase);
  launch_counts.blocks = uint64_t{config.grid.x} * config.grid.y * config.grid.z;
  launch_counts.threads = uint64_t{config.block.x} * config.block.y * config.block.z;
  launch_counts.dynamic_shared = config.shared_bytes;
  tensors.clear();
  for (const TensorPlace& place : tensor_places()) tensors.push_back({place, {}});
  most_rounds.assign(tensors.size(), 0);
  waiters.assign(launch_counts.threads, {});
  warps_of_block = static_cast<int>((launch_counts.threads + kLanes - 1) / kLanes);
  block = 0;
}

void end_counted_launch() {
  launch_counts.static_shared = static_shared_bytes();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const char* const name = tensors[i].place.name;
    for (size_t path = 0; path < kPaths; ++path) {
      if (tensors[i].paths[path]) launch_counts.tensors[name][kNames[path]] = tensors[i].paths[path]->traffic;
    }
    if (most_rounds[i] > 0) launch_counts.rounds[name] = most_rounds[i];
  }
  launches.push_back(std::move(launch_counts));
}

void begin_counted_block() {
  ++block;
  for (Waiter& waiter : waiters) waiter.loaded = false, waiter.rounds.assign(tensors.size(), 0);
}

void end_counted_block() {
  count_barrier();
  const auto total = [](const std::vector<uint64_t>& rounds) {
    uint64_t sum = 0;
    for (uint64_t each : rounds) sum += each;
    return sum;
  };
  for (Waiter& waiter : waiters) {
    if (waiter.loaded) ++waiter.rounds[waiter.slowest];
    if (total(waiter.rounds) > total(most_rounds)) most_rounds = waiter.rounds;
  }
}

void count_access(const void* place, size_t bytes, Path path, const Site& site) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(place);
  const bool shared = bytes > 0 && is_shared(at);
  if (bytes > 0 && !shared) {
    const size_t tensor = tensor_at(at, bytes);
    if (tensor == SIZE_MAX) return;
    Waiter& waiter = waiters[static_cast<size_t>(current->id)];
    const auto size = [](size_t i) { return tensors[i].place.end - tensors[i].place.begin; };
    if (path == Path::kLoad) {
      if (!waiter.loaded || size(tensor) > size(waiter.slowest)) waiter.slowest = tensor;
      waiter.loaded = true;
    } else if (path == Path::kUncached) {
      waiter.copied = tensor;
    }
  }
  Instruction& instruction = open[current->warp][key_of(site) * 2 + shared];
  instruction.path = path;
  uint32_t& joined = instruction.joined[static_cast<size_t>(current->lane)];
  if (joined == instruction.open.size()) instruction.open.emplace_back();
  instruction.open[joined++].lanes[static_cast<size_t>(current->lane)] = {at, static_cast<uint32_t>(bytes)};
}

void count_plain(const void* place, size_t bytes, Access access, const Site& site) {
  const Path path = access == Access::kRead ? Path::kLoad : access == Access::kWrite ? Path::kStore : Path::kAtomic;
  if (!current->fibre.owns(reinterpret_cast<uintptr_t>(place))) count_access(place, bytes, path, site);
}

void count_product() { ++launch_counts.products; }

void count_copies(size_t under_way) { launch_counts.copies = std::max<uint64_t>(launch_counts.copies, under_way); }

void count_wait() {
  Waiter& waiter = waiters[static_cast<size_t>(current->id)];
  if (waiter.loaded) ++waiter.rounds[waiter.slowest];
  waiter.loaded = false;
}

void count_wait_for_copies() {
  Waiter& waiter = waiters[static_cast<size_t>(current->id)];
  if (waiter.copied != SIZE_MAX) ++waiter.rounds[waiter.copied];
  waiter.copied = SIZE_MAX;
}

void count_meeting(int warp) {
  for (const auto& [key, instruction] : open[warp]) {
    for (const Request& request : instruction.open) {
      const auto lane = std::find_if(request.lanes.begin(), request.lanes.end(), [](Lane l) { return l.bytes > 0; });
      if (lane == request.lanes.end()) continue;
      is_shared(lane->at) ? finish_shared(request) : finish_global(request, instruction.path);
    }
  }
  open[warp].clear();
}

void count_barrier() {
  for (int warp = 0; warp < warps_of_block; ++warp) count_meeting(warp);
}

}  // namespace specengine::sim
