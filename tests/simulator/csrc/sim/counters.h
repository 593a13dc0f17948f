// What a launch does to memory, counted as a GPU's profiler counts it. Off unless a caller asks for it.
//
// A request is one access of the lanes of a warp: those that come from the same instruction for the same time since the
// warp last met. Lanes that skip a turn of a loop join the next request; such a request may have lanes of two turns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "sim/launch.h"
#include "sim/memory.h"

namespace specengine::sim {

// How global memory is accessed. Only kLoad may be served by L1.
enum class Path { kLoad, kUncached, kStore, kAtomic };

struct Traffic {
  uint64_t requests = 0;
  uint64_t bytes = 0;          // that lanes asked for
  uint64_t sectors = 0;        // of 32 bytes, distinct within each request
  uint64_t block_sectors = 0;  // distinct within each block
  uint64_t unique_bytes = 0;   // distinct within the launch
};

struct SharedTraffic {
  uint64_t requests = 0;
  uint64_t wavefronts = 0;  // turns that the 32 banks take
  uint64_t least = 0;       // the same without conflicts
};

struct LaunchCounts {
  std::string op;
  uint64_t kernel;  // its address in this module's file
  uint64_t blocks, threads, dynamic_shared, static_shared;
  uint64_t products = 0;  // of matrices, by warps: m16n8k16
  uint64_t copies = 0;    // of 16 bytes, under way at once: of the thread with the most
  SharedTraffic shared;
  std::map<std::string, std::map<std::string, Traffic>> tensors;  // by name and path
  std::map<std::string, uint64_t> rounds;  // waits for a load, by its largest tensor, of the thread with the most
};

extern bool counting;
void set_counting(bool on);  // forgets what was counted
const std::vector<LaunchCounts>& counted();

// All of these are called only while counting.
void count_launch(const LaunchConfig& config, const void* kernel);
void end_counted_launch();
void begin_counted_block();
void end_counted_block();
void count_access(const void* place, size_t bytes, Path path, const Site& site);  // no bytes: the lane sits out
void count_plain(const void* place, size_t bytes, Access access, const Site& site);
void count_product();
void count_copies(size_t under_way);  // of the current thread
void count_wait();                    // of the current thread, for others or a result
void count_wait_for_copies();         // of the current thread, for all of its copies
void count_meeting(int warp);         // all lanes of the warp have arrived
void count_barrier();                 // all threads have
size_t static_shared_bytes();         // of the launch: shared.cpp

}  // namespace specengine::sim
