// The only order between the blocks of a launch: a thread's atomic operation after its __threadfence releases all
// accesses before the fence, to every thread that later operates on the same address and then calls __threadfence.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "sim/race.h"

namespace specengine::sim {

class BlockOrder {
 public:
  void begin_launch(uint32_t epoch) {
    starts_.clear(), releases_.clear();
    launch_start_ = epoch;
  }
  void begin_block(uint32_t epoch) {
    starts_.push_back(epoch);
    seen_.clear(), acquired_.clear(), fences_.clear();
  }

  void fence(const Accessor& me) {
    fences_[me.thread] = me.now();
    const auto mine = [&](const Seen& each) { return each.thread == me.thread; };
    for (const Seen& each : seen_) {
      if (mine(each)) acquired_.push_back({each.releases, each.count, me.now()});
    }
    std::erase_if(seen_, mine);
  }

  void atomic(uintptr_t address, const Accessor& me) {
    std::vector<Moment>& list = releases_[address];
    if (!list.empty() && !known(list, me)) seen_.push_back({&list, list.size(), me.thread});
    if (const auto fence = fences_.find(me.thread); fence != fences_.end()) list.push_back(fence->second);
  }

  // The access of another block that conflicts with the current one.
  Conflict conflict(const Place& p, Access access, const Accessor& me) const {
    Moment m = p.writes.of_another_block(me);
    if (!ordered(m, me)) return {"has written", Access::kWrite, m.thread, m.epoch};
    // Operations on one address are ordered: a block that made one comes after all earlier ones.
    m = p.atomics.of_another_block(me);
    if (!is_atomic(access) && !p.atomics.of_this_block(me) && !ordered(m, me)) {
      return {"has changed atomically", Access::kAtomic, m.thread, m.epoch};
    }
    m = p.reads.of_another_block(me);
    if (access != Access::kRead && !ordered(m, me)) return {"has read", Access::kRead, m.thread, m.epoch};
    return {};
  }

  bool of_this_launch(const Accesses& a) const { return a.lanes != 0 && a.epoch >= launch_start_; }

  // The number of the block that ran at that epoch.
  size_t block_at(uint32_t epoch) const {
    return static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), epoch) - starts_.begin()) - 1;
  }

 private:
  struct Seen {  // by an operation of that thread, which has not called __threadfence since
    const std::vector<Moment>* releases;
    size_t count;
    int thread;
  };
  struct Acquired {
    const std::vector<Moment>* releases;  // the first `count` of them
    size_t count;
    Moment when;
  };

  bool known(const std::vector<Moment>& list, const Accessor& me) const {
    const bool seen = !seen_.empty() && seen_.back().releases == &list && seen_.back().count == list.size() &&
                      seen_.back().thread == me.thread;
    return seen || (!acquired_.empty() && acquired_.back().releases == &list && acquired_.back().count == list.size() &&
                    acquired_.back().when.thread == me.thread);
  }

  bool ordered(const Moment& m, const Accessor& me) const {
    if (m.epoch < launch_start_ || m.thread < 0) return true;
    const size_t block = block_at(m.epoch);  // an earlier one: it has ended
    for (const Acquired& a : acquired_) {
      if (!me.after(a.when)) continue;
      const auto end = a.releases->begin() + static_cast<ptrdiff_t>(a.count);
      auto fence = std::lower_bound(a.releases->begin(), end, starts_[block],
                                    [](const Moment& f, uint32_t epoch) { return f.epoch < epoch; });
      for (; fence != end && fence->epoch < starts_[block + 1]; ++fence) {
        if (m.epoch < fence->epoch || m.thread == fence->thread) return true;
        if (m.thread / kLanes == fence->thread / kLanes && m.clock < fence->clock) return true;
      }
    }
    return false;
  }

  uint32_t launch_start_ = 0;
  std::vector<uint32_t> starts_;  // the epoch in which each block began
  std::map<uintptr_t, std::vector<Moment>> releases_;
  std::vector<Seen> seen_;          // by this block
  std::vector<Acquired> acquired_;  // by this block
  std::map<int, Moment> fences_;    // the last one of each thread of this block
};

}  // namespace specengine::sim
