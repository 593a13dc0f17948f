#include "sim/launch.h"

#include <mutex>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "sim/block.h"
#include "sim/counters.h"
#include "sim/memory.h"

dim3 blockDim, gridDim;

namespace specengine {
namespace sim {
namespace {

int multiprocessor_count = 4, told_shared_bytes = kSharedBytes;
std::vector<uint64_t> block_order;

[[noreturn]] void fail(const LaunchConfig& config, const std::string& text) {
  throw std::runtime_error("simulator: " + std::string(config.name) + ": " + text);
}

void check_config(const LaunchConfig& config) {
  const auto text = [](dim3 d) { return text_of(uint3{d.x, d.y, d.z}); };
  const dim3 g = config.grid, b = config.block;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7FFFFFFFu || g.y > 65535 || g.z > 65535) {
    fail(config, "a grid of " + text(g) + " blocks is not within 1 to (2147483647,65535,65535)");
  }
  if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 ||
      uint64_t{b.x} * b.y * b.z > kMaxThreads) {
    fail(config, "a block of " + text(b) + " threads is not within 1 to 1024");
  }
  if (config.shared_bytes > kSharedBytes) {
    fail(config, std::to_string(config.shared_bytes) + " bytes of dynamic shared memory, more than 227 KiB");
  }
  if (const char* name = read_by_host()) fail(config, std::string(name) + " is read on the host");
}

uint3 index_of(uint64_t block) {
  return {static_cast<unsigned>(block % gridDim.x), static_cast<unsigned>(block / gridDim.x % gridDim.y),
          static_cast<unsigned>(block / gridDim.x / gridDim.y)};
}

struct InLaunch {
  InLaunch() { in_launch = true; }
  ~InLaunch() { in_launch = false; }
};

}  // namespace

void run_grid(const LaunchConfig& config, void (*body)(void*), void* params, size_t params_bytes,
              const std::vector<const void*>& written) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  check_config(config);
  const InLaunch mark;
  if (!counters_are_zero()) fail(config, "arrived is not zero before the launch");
  gridDim = config.grid, blockDim = config.block;
  begin_launch(params, params_bytes, written, config.shared_bytes);
  // Its parameters begin with the kernel's address.
  if (counting) [[unlikely]]
    count_launch(config, *static_cast<const void* const*>(params));
  block_order.resize(uint64_t{gridDim.x} * gridDim.y * gridDim.z);
  std::iota(block_order.begin(), block_order.end(), 0);
  for (size_t i = block_order.size(); i > 1; --i) {
    std::swap(block_order[i - 1], block_order[random_below(static_cast<uint32_t>(i))]);
  }
  for (uint64_t block : block_order) {
    if (!run_block(index_of(block), body, params)) {
      fail(config, "block " + text_of(index_of(block)) + " " + text_of_finding());
    }
  }
  if (!counters_are_zero()) fail(config, "arrived is not zero after the launch, so the next one miscounts");
  if (counting) [[unlikely]]
    end_counted_launch();
}

std::string name_of_block(size_t nth) { return "block " + text_of(index_of(block_order[nth])); }

void set_multiprocessors(int count) { multiprocessor_count = count; }
void set_most_shared_bytes(int bytes) { told_shared_bytes = bytes; }

}  // namespace sim

int multiprocessors(int) { return sim::multiprocessor_count; }
int most_shared_bytes(int) { return sim::told_shared_bytes; }

}  // namespace specengine
