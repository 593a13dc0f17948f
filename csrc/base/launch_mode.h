// How CUDA kernels are launched, for the whole process.
#pragma once

namespace specengine {

// Whether a kernel may start before its predecessor ends (programmatic dependent launch, compute capability 9.0 and
// up). A captured graph keeps the setting of its capture.
void set_programmatic_launch(bool enabled);

}  // namespace specengine
