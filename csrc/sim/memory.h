// Which memory a kernel may touch, and when. The kernels are compiled with calls before every access (GCC's
// -fsanitize=thread, with the functions of memory.cpp in place of its run-time library), so that they need no wrappers.
//
// A thread may use its own stack, the launch's parameters, this module's constants and variables, every tensor that
// the running op has checked, and the block's shared memory: there only inside one declared array, only what was
// written before, and only in order with the accesses of other threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>

#include "base/tensor_view.h"

namespace specengine::sim {

enum class Access { kRead, kWrite, kAtomic, kAtomicInitialise };

void begin_op();  // forgets the tensors of the one before on this thread
void note_tensor(const TensorView& tensor, const char* name);

void begin_launch(const void* params, size_t params_bytes, size_t dynamic_shared_bytes);
void begin_block();
void begin_epoch();  // after __syncthreads

void check_atomic(const void* place, size_t bytes, bool initialises, const void* instruction);
void check_shared_read(const void* place, size_t bytes, const std::source_location& where);
void check_global_read(const void* place, size_t bytes, const std::source_location& where);

// An asynchronous copy writes from its start, and nobody may touch the place before its end.
void start_copy(const void* place, size_t bytes, const std::source_location& where);
void finish_copy(const void* place, size_t bytes, const std::source_location& where);

uint32_t epoch();

}  // namespace specengine::sim
