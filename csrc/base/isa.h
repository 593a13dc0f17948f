// The CPU ops are compiled once per instruction set, each time in the namespace SPECENGINE_ISA, and chosen here at run
// time, so that one build runs on every machine of the architecture. Wide ops gain from wide registers and are compiled
// for every set, the others for the portable one and AVX2.
#pragma once
#include <atomic>
#include <stdexcept>

namespace specengine {

enum class Isa { kPortable, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni };  // later ones can do more
constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvxVnni, Isa::kAvx512, Isa::kAvx512Vnni};

inline const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvxVnni:
      return "avxvnni";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

// Whether this build and this machine have the instruction set.
inline bool runs_here([[maybe_unused]] Isa isa) {
#if defined(SPECENGINE_HAVE_X86)
  const auto has = [] {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  };
  const auto has512 = [&] {
    return has() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  };
  switch (isa) {
    case Isa::kAvx2:
      return has();
    case Isa::kAvxVnni:
      return has() && __builtin_cpu_supports("avxvnni");
    case Isa::kAvx512:
      return has512();
    case Isa::kAvx512Vnni:
      return has512() && __builtin_cpu_supports("avx512vnni");
    case Isa::kPortable:
      break;
  }
#endif
  return isa == Isa::kPortable;
}

inline Isa best_isa() {
  Isa best = Isa::kPortable;
  for (Isa isa : kIsas) {
    if (runs_here(isa)) best = isa;
  }
  return best;
}

// Atomic, because a test may switch it while another thread's op reads it without the GIL.
inline std::atomic<Isa>& active_isa() {
  static std::atomic<Isa> isa = best_isa();
  return isa;
}

#define SPECENGINE_CPU_OP_IN(isa, Op) \
  namespace isa {                     \
  void run(const Op&);                \
  }
#if defined(SPECENGINE_SIM)  // the simulator's module calls CPU ops but has none
#define SPECENGINE_CPU_OP(Op) \
  inline void run_cpu(const Op&) { throw std::logic_error(#Op " has no CPU kernel in this build"); }
#define SPECENGINE_WIDE_CPU_OP(Op) SPECENGINE_CPU_OP(Op)
#elif defined(SPECENGINE_HAVE_X86)
#define SPECENGINE_CPU_OP(Op)        \
  SPECENGINE_CPU_OP_IN(portable, Op) \
  SPECENGINE_CPU_OP_IN(avx2, Op)     \
  inline void run_cpu(const Op& op) { active_isa() == Isa::kPortable ? portable::run(op) : avx2::run(op); }
#define SPECENGINE_WIDE_CPU_OP(Op)     \
  SPECENGINE_CPU_OP_IN(portable, Op)   \
  SPECENGINE_CPU_OP_IN(avx2, Op)       \
  SPECENGINE_CPU_OP_IN(avxvnni, Op)    \
  SPECENGINE_CPU_OP_IN(avx512, Op)     \
  SPECENGINE_CPU_OP_IN(avx512vnni, Op) \
  inline void run_cpu(const Op& op) {  \
    switch (active_isa()) {            \
      case Isa::kPortable:             \
        return portable::run(op);      \
      case Isa::kAvx2:                 \
        return avx2::run(op);          \
      case Isa::kAvxVnni:              \
        return avxvnni::run(op);       \
      case Isa::kAvx512:               \
        return avx512::run(op);        \
      case Isa::kAvx512Vnni:           \
        return avx512vnni::run(op);    \
    }                                  \
  }
#else
#define SPECENGINE_CPU_OP(Op)        \
  SPECENGINE_CPU_OP_IN(portable, Op) \
  inline void run_cpu(const Op& op) { portable::run(op); }
#define SPECENGINE_WIDE_CPU_OP(Op) SPECENGINE_CPU_OP(Op)
#endif

}  // namespace specengine
