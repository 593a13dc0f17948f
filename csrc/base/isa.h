// The CPU ops are compiled once per instruction set, each time in the namespace named SPECENGINE_ISA, and chosen
// here at run time, so that one build runs on every machine of the architecture.
#pragma once

namespace specengine {

enum class Isa { kPortable, kAvx2 };

inline Isa best_isa() {
#if defined(SPECENGINE_HAVE_AVX2)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

inline Isa& active_isa() {  // tests switch it to compare the implementations
  static Isa isa = best_isa();
  return isa;
}

#if defined(SPECENGINE_HAVE_AVX2)
#define SPECENGINE_CPU_OP(Op) \
  namespace portable {        \
  void run(const Op&);        \
  }                           \
  namespace avx2 {            \
  void run(const Op&);        \
  }                           \
  inline void run_cpu(const Op& op) { active_isa() == Isa::kAvx2 ? avx2::run(op) : portable::run(op); }
#else
#define SPECENGINE_CPU_OP(Op) \
  namespace portable {        \
  void run(const Op&);        \
  }                           \
  inline void run_cpu(const Op& op) { portable::run(op); }
#endif

}  // namespace specengine
