// Worker threads for the CPU ops. Each starts with its own range of small pieces and then helps the others, so a core
// that another process holds slows down only the pieces it took. Results never depend on which thread ran a piece.
#pragma once
#include <cstdint>

namespace specengine {

// Calls body(context, i) once for every i in [0, count), on the caller's thread and the workers; returns when all calls
// have returned. body must not throw. A second caller at the same time runs its work alone, on its own thread.
void run_parallel(int64_t count, void (*body)(void*, int64_t), void* context);

// Lets the next run_parallel of this thread also call body(context, i) for every i in [0, count), among its own
// pieces. A job of a few small pieces costs more than the pieces.
void run_beside_next(int64_t count, void (*body)(void*, int64_t), void* context);

// Memory that is read soon.
struct MemoryRange {
  const void* begin;
  int64_t bytes;
};
constexpr int kMostRanges = 64;

// Lets the workers, which wait while the caller's thread is elsewhere, fetch the first ranges into the caches; returns
// at once. They stop at the next run_parallel. Ranges may be freed meanwhile: a prefetch never faults.
void fetch_while_idle(const MemoryRange* ranges, int count);

int num_threads();            // OMP_NUM_THREADS if set, else the cores this process may use
void set_num_threads(int n);  // takes effect at the next op

}  // namespace specengine
