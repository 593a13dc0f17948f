// Which memory a kernel may touch, and when. The kernels are compiled with a call before every access (GCC's
// -fsanitize=thread, with hooks.cpp in place of its run-time library), so that they need no wrappers.
//
// A thread may use its own stack, the launch's parameters, this module's constants and variables, every tensor that
// the running op has checked, and the block's shared memory. There an access stays inside one declared array and reads
// only bytes that were written before. Accesses that conflict must be ordered, in shared memory and in the tensors the
// launch may write.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/tensor_view.h"
#include "sim/race.h"
#include "sim/text.h"

namespace specengine::sim {

// Tensors: tensors.cpp.
void begin_op();  // forgets the tensors of this thread's previous op
void note_tensor(const TensorView& tensor, const char* name);
const char* read_by_host();  // a tensor that the op's launcher has read: on a GPU that would fail
void check_host_read(const void* place);
bool touch_tensor(uintptr_t at, size_t bytes, Access access, const Site& site);  // false: none has these bytes
void check_prefetch(uintptr_t at, const Site& site);  // of a line that begins there: counts as no access
extern uint64_t prefetched_lines;                     // of all launches
void check_never_written(const void* place, size_t bytes, const Site& site);  // by this launch, so far
std::string relative_to_tensors(uintptr_t at);
void note_fence();
std::string name_of_block_in(uint32_t epoch);
void begin_tensors(const std::vector<const void*>& written);
void begin_block_of_tensors();
struct TensorPlace {
  uintptr_t begin, end;
  const char* name;
};
std::vector<TensorPlace> tensor_places();  // of the launch
bool counters_are_zero();                  // all tensors of the op with the name `arrived`

// Shared memory: shared.cpp.
bool is_shared(uintptr_t at);
void touch_shared(uintptr_t at, size_t bytes, Access access, const Site& site);
// An asynchronous copy writes from its start on; no thread may touch the place before its end.
void start_copy(const void* to, size_t bytes, const Site& site);
void finish_copy(const void* to, size_t bytes, const Site& site);
void begin_shared(size_t dynamic_bytes);

// All of it: memory.cpp. check() is called by the kernels' code, and by the launchers', which it watches too;
// everything else here by the simulator, inside a Pause.
void check(const void* place, size_t bytes, Access access, const Site& site);
void touch_memory(uintptr_t at, size_t bytes, Access access, const Site& site);
// A race. Two threads that write the same value do no harm. Whether a conflicting write does is known only after it was
// made, so the thread's next access or wait settles it.
void race(const Conflict& conflict, const char* between, uintptr_t at, size_t bytes, Access access, const Site& site,
          const std::string& place);
extern bool unsettled_write;
void settle_write();
void begin_launch(const void* params, size_t params_bytes, const std::vector<const void*>& written,
                  size_t dynamic_shared_bytes);
void begin_block();
void begin_epoch();  // after __syncthreads

// The ends of a message.
std::string text_of_access(const char* what, Access access, size_t bytes);
std::string text_of_distance(uintptr_t at, uintptr_t begin, uintptr_t end, const char* name);

// Zero bytes that cost nothing until they are touched.
void* map_memory(size_t bytes);

}  // namespace specengine::sim
