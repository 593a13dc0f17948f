// The threads of the block that runs now. Blocks run one after the other, threads of a block one at a time until they
// exit or wait for others; who goes on is drawn at random from a seed.
#pragma once
#include <source_location>
#include <string>
#include <vector>

#include "sim/fibre.h"
#include "sim/race.h"
#include "sim/types.h"

namespace specengine::sim {

constexpr int kMaxThreads = 1024;

struct AsyncCopy {
  void* to;
  const void* from;  // nullptr: zeros
};

struct Thread {
  Fibre fibre;
  uint3 index;
  int id, warp, lane;
  bool exited;
  bool waited_for_previous;       // see wait_for_previous_kernel()
  const char* waits_at;           // what it waits at, nullptr: nothing
  std::source_location where;     // of that
  std::vector<AsyncCopy> copies;  // not yet performed
  std::vector<size_t> groups;     // how many of them each committed group has
};

// Lanes that wait for each other. Every lane brings the address of its own arguments; who comes last handles them all.
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

extern Thread* current;  // whose fibre runs
extern bool in_kernel;   // it runs the kernel's code: memory accesses are checked

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

// Ends the launch with an error about the current thread. `where`: of the source, or the address of an instruction.
[[noreturn]] void finding(const std::string& text, const std::source_location& where);
[[noreturn]] void finding(const std::string& text, const void* instruction);

Accessor accessor();  // the current thread
std::string name_of_thread(int id);

// Waits until every thread that has not exited is there, all with the same name and from the same place.
enum class Vote { kNone, kAnd, kOr, kCount };
int barrier(Vote vote, int value, const char* name, const std::source_location& where);

// Waits for the lanes of mask; the last one calls complete(arguments of all lanes, mask) with nobody else running.
using Complete = void (*)(void* const* arguments, unsigned mask);
void collective(const char* name, unsigned mask, void* arguments, Complete complete, const std::source_location& where);
void synchronise_warp(unsigned mask, const std::source_location& where);
unsigned lanes_alive();

void set_schedule(uint64_t seed);

}  // namespace specengine::sim
