// Marks functions that CPU ops and CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define SPECENGINE_HOST_DEVICE __host__ __device__
#else
#define SPECENGINE_HOST_DEVICE
#endif
