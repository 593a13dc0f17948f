#include "sim/block.h"

#include <dlfcn.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "sim/launch.h"
#include "sim/memory.h"
#include "sim/threads.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace specengine::sim {

Thread* current = nullptr;
bool in_kernel = false;

namespace {

constexpr size_t kMaxSharedBytes = 227 * 1024;

struct Barrier {
  int arrived;
  Vote vote;
  const char* name;
  std::source_location where;
  int yes;     // of the votes so far
  int result;  // of the last one: every thread reads it before the next one can complete
};

Thread threads[kMaxThreads];
Warp warps[kMaxThreads / kLanes];
Barrier barrier_state;
int block_threads, alive;
int ready[kMaxThreads], ready_count;
Fibre scheduler;

void (*kernel_body)(void*);
void* kernel_params;
bool failed;
std::string failure;
const void* failed_instruction;

uint64_t random_state = 1;
int multiprocessor_count = 4;

// xorshift64*: the schedule of a seed is the same everywhere.
uint32_t random_below(uint32_t bound) {
  random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
  return static_cast<uint32_t>((random_state * 0x2545F4914F6CDD1Dull >> 32) * bound >> 32);
}

std::string index_text(uint3 i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

std::string place_text(const std::source_location& where) {
  const char* slash = std::strrchr(where.file_name(), '/');
  return std::string(slash ? slash + 1 : where.file_name()) + ":" + std::to_string(where.line());
}

// file:line of an instruction, inlined callers after it; empty where the machine has no addr2line.
std::string place_text(const void* instruction) {
  Dl_info module;
  if (instruction == nullptr || dladdr(instruction, &module) == 0) return "";
  char command[512];
  std::snprintf(command, sizeof(command), "addr2line -i -e '%s' 0x%zx 2>/dev/null", module.dli_fname,
                static_cast<size_t>(static_cast<const char*>(instruction) - static_cast<char*>(module.dli_fbase)) - 1);
  std::string text;
  if (FILE* output = popen(command, "r")) {
    char line[1024];
    while (std::fgets(line, sizeof(line), output)) {
      std::string entry = line;
      if (entry.find("/sim/") != std::string::npos && entry.find(".h:") != std::string::npos) continue;
      entry = entry.substr(entry.rfind('/') + 1);
      entry = entry.substr(0, entry.find_first_of(" \n"));
      if (entry.empty() || entry[0] == '?') continue;
      text += (text.empty() ? "" : " in ") + entry;
    }
    pclose(output);
  }
  return text;
}

bool same_place(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

void make_ready(Thread& thread) {
  thread.waits_at = nullptr;
  ready[ready_count++] = thread.id;
}

// Lets somebody else run; returns when this thread is ready again and drawn.
void suspend(Fibre& from) {
  if (ready_count == 0) return from.switch_to(scheduler);
  const uint32_t drawn = random_below(static_cast<uint32_t>(ready_count));
  Thread& next = threads[ready[drawn]];
  ready[drawn] = ready[--ready_count];
  current = &next, threadIdx = next.index;
  if (&next.fibre != &from) from.switch_to(next.fibre);
}

void wait_at(Thread& thread, const char* name, const std::source_location& where) {
  thread.waits_at = name, thread.where = where;
  suspend(thread.fibre);
}

void end_barrier() {
  Barrier& b = barrier_state;
  b.result = b.vote == Vote::kAnd ? b.yes == alive : b.vote == Vote::kOr ? b.yes > 0 : b.yes;
  b.arrived = 0, b.yes = 0;
  begin_epoch();
}

void release_barrier() {
  end_barrier();
  for (int i = 0; i < block_threads; ++i) {
    if (!threads[i].exited && threads[i].waits_at != nullptr && &threads[i] != current) make_ready(threads[i]);
  }
}

void exit_thread() {
  Thread& me = *current;
  in_kernel = false;
  me.exited = true, --alive;
  Warp& warp = warps[me.warp];
  warp.alive &= ~(1u << me.lane);
  for (int i = 0; i < warp.open; ++i) {
    const Rendezvous& r = warp.meetings[i];
    if (r.mask >> me.lane & 1) {
      finding("exits, but " + std::string(r.name) + " waits for it at " + place_text(r.where), nullptr);
    }
  }
  if (alive > 0 && barrier_state.arrived == alive) release_barrier();
  suspend(me.fibre);
}

void thread_entry() {
  in_kernel = true;
  kernel_body(kernel_params);
  exit_thread();
}

std::string describe_waiting(const Thread& thread) {
  return "thread " + index_text(thread.index) + " waits at " + thread.waits_at + " (" + place_text(thread.where) + ")";
}

// No thread can go on, and some have not exited.
void report_deadlock() {
  const Thread *first = nullptr, *second = nullptr;
  for (int i = 0; i < block_threads; ++i) {
    const Thread& t = threads[i];
    if (t.exited) continue;
    if (first == nullptr)
      first = &t;
    else if (second == nullptr && (t.waits_at != first->waits_at || !same_place(t.where, first->where)))
      second = &t;
  }
  current = const_cast<Thread*>(first);
  failed = true, failed_instruction = nullptr;
  failure = "divergent barrier or collective, nobody can go on: " + describe_waiting(*first) +
            (second ? ", " + describe_waiting(*second) : ", and the lanes it waits for do not come");
}

void run_block(uint3 index) {
  blockIdx = index;
  begin_block();
  barrier_state = {};
  alive = block_threads, ready_count = 0;
  for (int w = 0; w * kLanes < block_threads; ++w) {
    const int lanes = block_threads - w * kLanes;
    warps[w].alive = lanes >= kLanes ? 0xFFFFFFFFu : (1u << lanes) - 1, warps[w].open = 0;
  }
  for (int i = 0; i < block_threads; ++i) {
    Thread& t = threads[i];
    const unsigned id = static_cast<unsigned>(i);
    t.index = {id % blockDim.x, id / blockDim.x % blockDim.y, id / (blockDim.x * blockDim.y)};
    t.id = i, t.warp = i / kLanes, t.lane = i % kLanes;
    t.exited = t.waited_for_previous = false;
    t.copies.clear(), t.groups.clear();
    t.fibre.start_at(thread_entry);
    make_ready(t);
  }
  suspend(scheduler);
  if (!failed && alive > 0) report_deadlock();
}

void fail_launch(const LaunchConfig& config, const std::string& text) {
  throw std::runtime_error("simulator: " + std::string(config.name) + ": " + text);
}

void check_config(const LaunchConfig& config) {
  const auto text = [](dim3 d) { return index_text({d.x, d.y, d.z}); };
  const dim3 g = config.grid, b = config.block;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7FFFFFFFu || g.y > 65535 || g.z > 65535) {
    fail_launch(config, "a grid of " + text(g) + " blocks is not within 1 to (2147483647,65535,65535)");
  }
  if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 ||
      uint64_t{b.x} * b.y * b.z > kMaxThreads) {
    fail_launch(config, "a block of " + text(b) + " threads is not within 1 to 1024");
  }
  if (config.shared_bytes > kMaxSharedBytes) {
    fail_launch(config, std::to_string(config.shared_bytes) + " bytes of dynamic shared memory, more than 227 KiB");
  }
}

}  // namespace

void run_grid(const LaunchConfig& config, void (*body)(void*), void* params, size_t params_bytes) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  check_config(config);
  gridDim = config.grid, blockDim = config.block;
  block_threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  kernel_body = body, kernel_params = params, failed = false;
  begin_launch(params, params_bytes, config.shared_bytes);
  std::vector<uint64_t> order(uint64_t{gridDim.x} * gridDim.y * gridDim.z);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(static_cast<uint32_t>(i))]);
  for (uint64_t block : order) {
    run_block({static_cast<unsigned>(block % gridDim.x), static_cast<unsigned>(block / gridDim.x % gridDim.y),
               static_cast<unsigned>(block / gridDim.x / gridDim.y)});
    if (failed) {
      const std::string place = place_text(failed_instruction);
      fail_launch(config, "block " + index_text(blockIdx) + " thread " + index_text(current->index) + ": " + failure +
                              (place.empty() ? "" : " at " + place));
    }
  }
}

// The frames of all threads are simply left: kernels own nothing that would have to be given back.
void finding(const std::string& text, const void* instruction) {
  failed = true, failure = text, failed_instruction = instruction;
  in_kernel = false;
  current->fibre.switch_to(scheduler);
  __builtin_unreachable();
}

void finding(const std::string& text, const std::source_location& where) {
  finding(text + " at " + place_text(where), nullptr);
}

Accessor accessor() { return {current->id, current->warp, current->lane, epoch(), warps[current->warp].order}; }

std::string name_of_thread(int id) { return "thread " + index_text(threads[id].index); }

int lane_of_running() { return current->lane; }
unsigned lanes_alive() { return warps[current->warp].alive; }

int barrier(Vote vote, int value, const char* name, const std::source_location& where) {
  const Pause pause;
  Barrier& b = barrier_state;
  if (b.arrived == 0) {
    b.vote = vote, b.name = name, b.where = where;
  } else if (b.vote != vote || !same_place(b.where, where)) {
    finding("divergent barrier: waits at " + std::string(name) + " (" + place_text(where) + "), others at " + b.name +
                " (" + place_text(b.where) + ")",
            nullptr);
  }
  b.yes += value != 0;
  if (++b.arrived == alive) {
    release_barrier();
  } else {
    wait_at(*current, name, where);
  }
  return b.result;
}

void collective(const char* name, unsigned mask, void* arguments, Complete complete,
                const std::source_location& where) {
  const Pause pause;
  Thread& me = *current;
  Warp& warp = warps[me.warp];
  const auto hex = [](unsigned bits) {
    char text[16];
    std::snprintf(text, sizeof(text), "0x%08x", bits);
    return std::string(text);
  };
  const std::string_view own = name;
  if (!(mask >> me.lane & 1))
    finding(std::string(name) + ": mask " + hex(mask) + " leaves out the calling lane", where);
  if (const unsigned absent = mask & ~warp.alive) {
    finding(std::string(name) + ": mask " + hex(mask) + " names lane " + std::to_string(std::countr_zero(absent)) +
                ", which has exited or does not exist",
            where);
  }
  Rendezvous* r = nullptr;
  for (int i = 0; i < warp.open; ++i) {
    Rendezvous& open = warp.meetings[i];
    if (!(open.mask >> me.lane & 1) || !(open.arrived & mask)) continue;  // they do not wait for each other
    if (open.mask != mask || own != open.name || (own != "__syncwarp" && !same_place(open.where, where))) {
      finding(std::string(name) + " with mask " + hex(mask) + " while lane " +
                  std::to_string(std::countr_zero(open.arrived)) + " waits for this lane at " + open.name +
                  " with mask " + hex(open.mask) + " (" + place_text(open.where) + ")",
              where);
    }
    r = &open;
  }
  if (r == nullptr) {
    r = &warp.meetings[warp.open++];
    r->name = name, r->mask = mask, r->arrived = 0, r->where = where;
  }
  r->arguments[me.lane] = arguments, r->arrived |= 1u << me.lane;
  if (r->arrived != mask) return wait_at(me, name, where);
  complete(r->arguments, mask);
  *r = warp.meetings[--warp.open];
  for (unsigned left = mask & ~(1u << me.lane); left != 0; left &= left - 1) {
    make_ready(threads[me.warp * kLanes + std::countr_zero(left)]);
  }
}

void synchronise_warp(unsigned mask, const std::source_location& where) {
  collective(
      "__syncwarp", mask, nullptr,
      [](void* const*, unsigned lanes) {
        Warp& warp = warps[current->warp];
        warp.order.synchronise(lanes, warp.alive);
      },
      where);
}

void check_shuffle(const char* name, unsigned mask, int source, int width, const std::source_location& where) {
  const Pause pause;
  if (width < 1 || width > kLanes || (width & (width - 1)) != 0) {
    finding(std::string(name) + ": width " + std::to_string(width) + " is not a power of two up to 32", where);
  }
  if (!(mask >> source & 1)) {
    finding(std::string(name) + ": reads lane " + std::to_string(source) + ", which the mask leaves out", where);
  }
}

void set_schedule(uint64_t seed) { random_state = seed * 2 + 1; }
void set_multiprocessors(int count) { multiprocessor_count = count; }

}  // namespace specengine::sim

namespace specengine {

int multiprocessors(int) { return sim::multiprocessor_count; }

}  // namespace specengine
