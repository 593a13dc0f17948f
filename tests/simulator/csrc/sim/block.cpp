#include "sim/block.h"

#include <bit>
#include <cstring>

#include "sim/counters.h"
#include "sim/launch.h"
#include "sim/memory.h"
#include "sim/threads.h"

uint3 threadIdx, blockIdx;

namespace specengine::sim {

constinit thread_local Thread* current = nullptr;
constinit thread_local bool in_launch = false;
constinit thread_local bool in_kernel = false;
uint32_t epoch = 1, first_epoch_of_block = 1;

namespace {

// Lanes that wait for each other. Every lane brings the address of its own arguments; the last lane handles them all.
struct Rendezvous {
  const char* name;
  unsigned mask, arrived;
  std::source_location where;
  void* arguments[kLanes];
};

struct Warp {
  unsigned alive;  // lanes that exist and have not exited
  int open;        // rendezvous under way
  Rendezvous meetings[kLanes];
  WarpOrder order;
};

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

uint64_t random_state = 1;

void make_ready(Thread& thread) {
  thread.waits_at = nullptr;
  ready[ready_count++] = thread.id;
}

// Lets another thread run; returns when this thread is ready again and chosen.
void suspend(Fibre& from) {
  if (ready_count == 0) return from.switch_to(scheduler);
  const uint32_t drawn = random_below(static_cast<uint32_t>(ready_count));
  Thread& next = threads[ready[drawn]];
  ready[drawn] = ready[--ready_count];
  current = &next, threadIdx = next.index;
  if (&next.fibre != &from) from.switch_to(next.fibre);
}

void wait_at(Thread& thread, const char* name, const std::source_location& where) {
  if (unsettled_write) settle_write();
  thread.steps = 0;
  thread.waits_at = name, thread.where = where;
  suspend(thread.fibre);
}

void end_barrier() {
  Barrier& b = barrier_state;
  b.result = b.vote == Vote::kAnd ? b.yes == alive : b.vote == Vote::kOr ? b.yes > 0 : b.yes;
  b.arrived = 0, b.yes = 0;
  begin_epoch();
  if (counting) [[unlikely]]
    count_barrier();
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
  if (unsettled_write) settle_write();
  me.exited = true, --alive;
  Warp& warp = warps[me.warp];
  warp.alive &= ~(1u << me.lane);
  for (int i = 0; i < warp.open; ++i) {
    const Rendezvous& r = warp.meetings[i];
    if (r.mask >> me.lane & 1) {
      finding("exits, but " + std::string(r.name) + " waits for it", r.where);
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

void end_warp_barrier(void* const*, unsigned lanes) {
  Warp& warp = warps[current->warp];
  warp.order.synchronise(lanes, warp.alive);
}

std::string describe_waiting(const Thread& thread) {
  return "thread " + text_of(thread.index) + " waits at " + thread.waits_at + " (" + text_of(thread.where) + ")";
}

// No thread can go on, and some have not exited.
void report_deadlock() {
  const Thread *first = nullptr, *second = nullptr;
  for (int i = 0; i < block_threads; ++i) {
    const Thread& t = threads[i];
    if (t.exited) continue;
    if (first == nullptr) {
      first = &t;
    } else if (second == nullptr && (t.waits_at != first->waits_at || !same_place(t.where, first->where))) {
      second = &t;
    }
  }
  failed = true;
  failure = "thread " + text_of(first->index) +
            ": divergent barrier or collective, no thread can go on: " + describe_waiting(*first) + ", " +
            (second ? describe_waiting(*second) : "and the lanes it waits for do not come");
}

}  // namespace

bool run_block(uint3 index, void (*body)(void*), void* params) {
  kernel_body = body, kernel_params = params, failed = false;
  block_threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  blockIdx = index;
  begin_block();
  if (counting) [[unlikely]]
    begin_counted_block();
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
    t.id = i, t.warp = i / kLanes, t.lane = i % kLanes, t.order = &warps[t.warp].order;
    t.exited = t.waited_for_previous = false, t.steps = 0;
    t.copies.clear(), t.groups.clear();
    t.fibre.start_at(thread_entry);
    make_ready(t);
  }
  suspend(scheduler);
  if (!failed && alive > 0) report_deadlock();
  if (counting && !failed) [[unlikely]]
    end_counted_block();
  return !failed;
}

std::string text_of_finding() { return failure; }

// Leaves the frames of all threads: kernels own nothing that must be freed.
void finding(const std::string& text, const Site& site) {
  in_kernel = false;
  failed = true, failure = name_of_thread(current->id) + ": " + text + text_of(site);
  current->fibre.switch_to(scheduler);
  __builtin_unreachable();
}

std::string name_of_thread(int id) { return "thread " + text_of(threads[id].index); }

unsigned lanes_alive() { return warps[current->warp].alive; }

int barrier(Vote vote, int value, const char* name, const std::source_location& where) {
  const Pause pause;
  if (counting) [[unlikely]]
    count_wait();
  Barrier& b = barrier_state;
  if (b.arrived == 0) {
    b.vote = vote, b.name = name, b.where = where;
  } else if (b.vote != vote || !same_place(b.where, where)) {
    finding("divergent barrier: waits at " + std::string(name) + " (" + text_of(where) + "), others at " + b.name +
                " (" + text_of(b.where) + ")",
            Site(nullptr));
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
  if (counting) [[unlikely]]
    count_wait();
  if (!(mask >> me.lane & 1))
    finding(std::string(name) + ": mask " + text_of_mask(mask) + " leaves out the calling lane", where);
  if (const unsigned absent = mask & ~warp.alive) {
    finding(std::string(name) + ": mask " + text_of_mask(mask) + " names lane " +
                std::to_string(std::countr_zero(absent)) + ", which has exited or does not exist",
            where);
  }
  Rendezvous* r = nullptr;
  for (int i = 0; i < warp.open; ++i) {
    Rendezvous& open = warp.meetings[i];
    if (!(open.mask >> me.lane & 1) || !(open.arrived & mask)) continue;  // the two do not wait for each other
    if (open.mask != mask || !same_text(open.name, name) ||
        (complete != end_warp_barrier && !same_place(open.where, where))) {
      finding(std::string(name) + " with mask " + text_of_mask(mask) + " while lane " +
                  std::to_string(std::countr_zero(open.arrived)) + " waits for this lane at " + open.name +
                  " with mask " + text_of_mask(open.mask) + " (" + text_of(open.where) + ")",
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
  if (counting && mask == warp.alive) [[unlikely]]
    count_meeting(me.warp);
  *r = warp.meetings[--warp.open];
  for (unsigned left = mask & ~(1u << me.lane); left != 0; left &= left - 1) {
    make_ready(threads[me.warp * kLanes + std::countr_zero(left)]);
  }
}

void synchronise_warp(unsigned mask, const std::source_location& where) {
  collective("__syncwarp", mask, nullptr, end_warp_barrier, where);
}

void fence() {
  const Pause pause;
  note_fence();
}

int shuffle_source(Shuffle kind, const char* name, unsigned mask, int by, int width,
                   const std::source_location& where) {
  const Pause pause;
  if (width < 1 || width > kLanes || (width & (width - 1)) != 0) {
    finding(std::string(name) + ": width " + std::to_string(width) + " is not a power of two up to 32", where);
  }
  const int lane = current->lane, segment = kLanes - width, first = lane & segment, last = first | (31 & ~segment);
  by &= 31;
  int source = kind == Shuffle::kIndex  ? first | (by & ~segment)
               : kind == Shuffle::kUp   ? lane - by
               : kind == Shuffle::kDown ? lane + by
                                        : lane ^ by;
  if (kind == Shuffle::kUp ? source < first : source > last) source = lane;
  if (!(mask >> source & 1)) {
    finding(std::string(name) + ": reads lane " + std::to_string(source) + ", which the mask leaves out", where);
  }
  return source;
}

void set_schedule(uint64_t seed) { random_state = seed * 2 + 1; }

// xorshift64*: the schedule of a seed is the same everywhere.
uint32_t random_below(uint32_t bound) {
  random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
  return static_cast<uint32_t>((random_state * 0x2545F4914F6CDD1Dull >> 32) * bound >> 32);
}

}  // namespace specengine::sim
