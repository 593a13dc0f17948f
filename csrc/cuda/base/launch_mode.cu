#include "base/launch_mode.h"

#include "cuda/base/device.cuh"

namespace specengine {

void set_programmatic_launch(bool enabled) { programmatic_launch() = enabled; }

}  // namespace specengine
