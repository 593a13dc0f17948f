// A loop whose iterations the threads share.
#pragma once
#include <cstdint>

#include "base/thread_pool.h"

namespace specengine::SPECENGINE_ISA {

// In this namespace, not in the pool's: an inline function compiled for AVX2 must never serve the portable build.
template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  run_parallel(
      count, [](void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace specengine::SPECENGINE_ISA
