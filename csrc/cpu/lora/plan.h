// What a call of add_lora has to do: the rows of each adapter, and tasks of A and of B that threads share.
#pragma once
#include <algorithm>
#include <vector>

#include "base/thread_pool.h"
#include "ops/lora.h"

namespace specengine::SPECENGINE_ISA {

constexpr int64_t kPanelsOfTask = 4;  // of B at least: a row alone walks so many chains at once

// Rows of one adapter: plan.rows[begin, end).
struct Group {
  int32_t adapter;
  int64_t begin, end;
};

struct Task {
  const Group* group;
  const LoraModule* module;
  float* sums;           // of the module in the workspace: [M, chunks, R]
  int64_t first, count;  // a chunk of columns, or panels of output columns
};

struct Plan {
  std::vector<int64_t> rows;
  std::vector<Group> groups;
  std::vector<Task> shrink, expand;

  void make(const AddLora& op) {
    rows.clear(), groups.clear(), shrink.clear(), expand.clear();
    gather_rows(op);
    float* sums = op.workspace.as<float>();
    for (const LoraModule& module : op.projection->modules) {
      for (const Group& group : groups) {
        if (module.ranks.as<int32_t>()[group.adapter] > 0) add_tasks(module, group, sums);
      }
      sums += op.out.shape[0] * module.chunks() * module.rank();
    }
  }

 private:
  void gather_rows(const AddLora& op) {
    const int32_t *start = op.row_start.as<int32_t>(), *adapters = op.adapters.as<int32_t>();
    const int64_t B = op.adapters.shape[0];
    for (int64_t first = 0; first < B; ++first) {
      const int32_t adapter = adapters[first];
      const bool known =
          std::any_of(groups.begin(), groups.end(), [&](const Group& g) { return g.adapter == adapter; });
      if (adapter < 0 || known) continue;
      const int64_t begin = static_cast<int64_t>(rows.size());
      for (int64_t b = first; b < B; ++b) {
        for (int64_t m = start[b]; adapters[b] == adapter && m < start[b + 1]; ++m) rows.push_back(m);
      }
      groups.push_back({adapter, begin, static_cast<int64_t>(rows.size())});
    }
  }

  void add_tasks(const LoraModule& module, const Group& group, float* sums) {
    for (int64_t first = 0; first < module.columns(); first += kLoraChunk) {
      shrink.push_back({&group, &module, sums, first, std::min(kLoraChunk, module.columns() - first)});
    }
    const int64_t per_thread = module.panels() / (4 * num_threads());
    const int64_t per_task = std::max<int64_t>(1, per_thread / kPanelsOfTask) * kPanelsOfTask;
    for (int64_t first = 0; first < module.panels(); first += per_task) {
      expand.push_back({&group, &module, sums, first, std::min(per_task, module.panels() - first)});
    }
  }
};

}  // namespace specengine::SPECENGINE_ISA
