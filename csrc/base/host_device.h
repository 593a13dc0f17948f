// Marks functions that CPU ops and CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define SPECENGINE_HOST_DEVICE __host__ __device__
#define SPECENGINE_NO_UNROLL _Pragma("unroll 1")
#else
#define SPECENGINE_HOST_DEVICE
#define SPECENGINE_NO_UNROLL
#endif
