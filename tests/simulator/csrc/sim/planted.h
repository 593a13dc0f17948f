// Kernels with planted bugs, by name: planted.cu (barriers, lanes, waits), planted_memory.cu, planted_blocks.cu.
//
// Each does something simple in a correct way or, with `broken`, with the one bug that it is named after. A kernel runs
// on blocks of 64 threads; in: [64] float, out: [64] float.
#pragma once
#include <map>
#include <string>

namespace specengine::sim {

constexpr int kPlantedThreads = 64;
using PlantedKernel = void (*)(const float* in, float* out, bool broken);
using PlantedKernels = std::map<std::string, PlantedKernel>;
#define SPECENGINE_PLANTED(name) {#name, name}

const PlantedKernels& planted_memory_kernels();
const PlantedKernels& planted_block_kernels();  // of two blocks
bool counts_arrivals(const std::string& name);  // in out[3], which is then checked as a tensor with the name `arrived`

}  // namespace specengine::sim
