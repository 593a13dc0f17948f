#include "sim/fibre.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace specengine::sim {

// Saves the stack pointer and the registers that a call must preserve, then loads the other fibre's.
extern "C" void specengine_sim_switch(void** save, void* next);

#if defined(__x86_64__)
asm(R"(
.text
.hidden specengine_sim_switch
.globl specengine_sim_switch
.type specengine_sim_switch, @function
specengine_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size specengine_sim_switch, .-specengine_sim_switch
)");

void Fibre::start_at(void (*entry)()) {
  if (stack_ == nullptr) stack_ = map_stack();
  void** top = reinterpret_cast<void**>(stack_ + kStackBytes);
  *--top = nullptr;  // where a return address would be: keeps the stack aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
}
#elif defined(__aarch64__)
asm(R"(
.text
.hidden specengine_sim_switch
.globl specengine_sim_switch
.type specengine_sim_switch, @function
specengine_sim_switch:
  sub sp, sp, #160
  stp x29, x30, [sp, #0]
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x29, x30, [sp, #0]
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size specengine_sim_switch, .-specengine_sim_switch
)");

void Fibre::start_at(void (*entry)()) {
  if (stack_ == nullptr) stack_ = map_stack();
  void** frame = reinterpret_cast<void**>(stack_ + kStackBytes) - 20;
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[1] = reinterpret_cast<void*>(entry);
  stack_pointer_ = frame;
}
#endif

#if defined(__x86_64__) || defined(__aarch64__)
void Fibre::switch_to(Fibre& next) { specengine_sim_switch(&stack_pointer_, next.stack_pointer_); }
#else
void Fibre::start_at(void (*entry)()) {
  if (stack_ == nullptr) stack_ = map_stack();
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_, context_.uc_stack.ss_size = kStackBytes, context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
}
void Fibre::switch_to(Fibre& next) { swapcontext(&context_, &next.context_); }
#endif

// With a guard page below: a stack overflow ends the process instead of overwriting another thread's values.
char* Fibre::map_stack() {
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, guard, PROT_NONE);
  return static_cast<char*>(memory) + guard;
}

}  // namespace specengine::sim
