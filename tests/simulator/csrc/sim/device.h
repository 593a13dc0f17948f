// The device language for a host compiler, under CUDA's own names, in place of nvcc's for cuda/base/device.cuh. The
// functions behave as CUDA documents and report behaviour that it leaves undefined.
#pragma once
#include "sim/launch.h"
#include "sim/math.h"
#include "sim/threads.h"
#include "sim/types.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
