// A thread of execution with a stack of its own that runs until it switches to another one.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace specengine::sim {

class Fibre {
 public:
  Fibre() = default;  // the stack that runs now; the first switch away saves its state
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  bool owns(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(stack_) < kStackBytes; }
  // The next switch to this fibre calls entry, which never returns. Its stack is mapped the first time and kept.
  void start_at(void (*entry)());
  void switch_to(Fibre& next);  // returns when another fibre switches back

 private:
  static constexpr size_t kStackBytes = 128 * 1024;
  static char* map_stack();

  char* stack_ = nullptr;
#if defined(__x86_64__) || defined(__aarch64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace specengine::sim
