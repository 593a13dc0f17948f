// The threads of the block that runs now. Blocks run one after the other, threads of a block one at a time until they
// exit or wait for others; a seeded random number chooses the next one.
#pragma once
#include <source_location>
#include <string>
#include <vector>

#include "sim/fibre.h"
#include "sim/race.h"
#include "sim/text.h"
#include "sim/types.h"

namespace specengine::sim {

constexpr int kMaxThreads = 1024;
constexpr size_t kSharedBytes = 227 * 1024, kStaticSharedBytes = 48 * 1024;

struct AsyncCopy {
  void* to;
  const void* from;  // nullptr: zeros
};

struct Thread {
  Fibre fibre;
  uint3 index;
  int id, warp, lane;
  const WarpOrder* order;  // of its warp
  bool exited;
  bool waited_for_previous;       // see wait_for_previous_kernel()
  uint32_t steps;                 // memory accesses since it last waited
  const char* waits_at;           // name of the barrier or collective; nullptr: it does not wait
  std::source_location where;     // of that
  std::vector<AsyncCopy> copies;  // not yet performed
  std::vector<size_t> groups;     // how many of them each committed group has
};

// Per thread of the host, of which one at a time launches. Initial-exec: they are read at every access.
#define SPECENGINE_SIM_STATE extern constinit thread_local __attribute__((tls_model("initial-exec")))
SPECENGINE_SIM_STATE Thread* current;  // whose fibre runs
SPECENGINE_SIM_STATE bool in_launch;
SPECENGINE_SIM_STATE bool in_kernel;  // the kernel's own code runs: memory accesses are checked
#undef SPECENGINE_SIM_STATE

// Marks the simulator's own work on behalf of the current thread.
class Pause {
 public:
  Pause() : before_(in_kernel) { in_kernel = false; }
  ~Pause() { in_kernel = before_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  const bool before_;
};

// Runs all threads to their end. False: there was a finding; text_of_finding() returns it.
bool run_block(uint3 index, void (*body)(void*), void* params);
std::string text_of_finding();

// Ends the launch with an error about the current thread.
[[noreturn]] void finding(const std::string& text, const Site& site);

// Epochs go on over all launches; the current one, and the first of this block.
extern uint32_t epoch, first_epoch_of_block;

inline Accessor accessor() {
  return {current->id, current->warp, current->lane, epoch, first_epoch_of_block, *current->order};
}
std::string name_of_thread(int id);

// Waits until every thread that has not exited is there, all with the same name and from the same place.
enum class Vote { kNone, kAnd, kOr, kCount };
int barrier(Vote vote, int value, const char* name, const std::source_location& where);

// Waits for the lanes of mask; the last one calls complete(arguments of all lanes, mask) while no other lane runs.
using Complete = void (*)(void* const* arguments, unsigned mask);
void collective(const char* name, unsigned mask, void* arguments, Complete complete, const std::source_location& where);
void synchronise_warp(unsigned mask, const std::source_location& where);
unsigned lanes_alive();

void set_schedule(uint64_t seed);
uint32_t random_below(uint32_t bound);

}  // namespace specengine::sim
