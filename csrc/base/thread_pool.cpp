#include "base/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace specengine {
namespace {

// About 50 us: longer than the gap between two ops of a forward pass, short enough that an idle engine
// costs nothing. After it a worker sleeps on the condition variable.
constexpr int kSpinRounds = 1500;
constexpr int kMaxThreads = 1024;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  explicit ThreadPool(int threads) : wanted_(threads), shares_(new Share[threads]) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
      // The system gives no more threads: those that exist share the work.
    }
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      stopping_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int wanted() const { return wanted_; }

  void run(int64_t count, void (*body)(void*, int64_t), void* context) {
    ranges_left_.store(0, std::memory_order_relaxed);
    body_ = body, context_ = context;
    for (int i = 0; i < wanted_; ++i) {
      shares_[i].next.store(count * i / wanted_, std::memory_order_relaxed);
      shares_[i].end = count * (i + 1) / wanted_;
    }
    open_.store(true);
    {
      // Under the mutex so that a worker about to sleep cannot miss the new generation.
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      generation_.fetch_add(1);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    take_pieces(0);
    open_.store(false);
    // A worker counts itself active before it looks at open_: at zero, no worker can touch this job again.
    for (int spins = 0; active_.load() != 0; ++spins) spins < kSpinRounds ? pause() : (void)sched_yield();
  }

  void fetch(const MemoryRange* ranges, int count) {
    ranges_left_.store(0);  // a worker that still fetches may mix old and new ranges, which does no harm
    for (int i = 0; i < count; ++i) {
      ranges_[i].begin.store(static_cast<const char*>(ranges[i].begin), std::memory_order_relaxed);
      ranges_[i].bytes.store(ranges[i].bytes, std::memory_order_relaxed);
    }
    next_piece_.store(0, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      ranges_left_.store(count);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
  }

 private:
  static constexpr int64_t kFetched = 16384;  // bytes that a worker takes at once
  struct Range {
    std::atomic<const char*> begin{nullptr};
    std::atomic<int64_t> bytes{0};
  };

  // The pieces that a thread begins with lie side by side, so its prefetches reach into the next piece.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void take_pieces(int thread) {
    for (int turn = 0; turn < wanted_; ++turn) {
      Share& share = shares_[(thread + turn) % wanted_];
      for (int64_t i;
           share.next.load(std::memory_order_relaxed) < share.end && (i = share.next.fetch_add(1)) < share.end;) {
        body_(context_, i);
      }
    }
  }

  void work(int thread) {
    uint64_t seen = 0;
    while (true) {
      wait_for_change(seen);
      seen = generation_.load();
      if (stopping_) return;
      active_.fetch_add(1);
      if (open_.load()) take_pieces(thread);
      active_.fetch_sub(1);
    }
  }

  void wait_for_change(uint64_t seen) {
    while (true) {
      for (int i = 0; i < kSpinRounds; ++i) {
        if (generation_.load() != seen) return;
        if (ranges_left_.load(std::memory_order_relaxed) > 0) {
          fetch_piece(seen), i = 0;
        } else {
          pause();
        }
      }
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return generation_.load() != seen || ranges_left_.load() > 0; });
      sleeping_.fetch_sub(1);
    }
  }

  // Fetches the next piece of the ranges; looks every few lines whether there is a job.
  void fetch_piece(uint64_t seen) {
    int64_t first = next_piece_.fetch_add(1) * kFetched;
    const int count = ranges_left_.load();
    for (int i = 0; i < count; ++i) {
      const int64_t bytes = ranges_[i].bytes.load(std::memory_order_relaxed);
      if (first >= bytes) {
        first -= (bytes + kFetched - 1) / kFetched * kFetched;
        continue;
      }
      const char* begin = ranges_[i].begin.load(std::memory_order_relaxed);
      for (int64_t at = first; at < std::min(bytes, first + kFetched); at += 64) {
        if (at % 1024 == 0 && generation_.load(std::memory_order_relaxed) != seen) return;
        __builtin_prefetch(begin + at, 0, 2);
      }
      return;
    }
    ranges_left_.store(0);
  }

  int wanted_;
  std::unique_ptr<Share[]> shares_;
  std::vector<std::thread> workers_;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
  std::atomic<uint64_t> generation_{0};
  std::atomic<bool> stopping_{false};
  Range ranges_[kMostRanges];
  std::atomic<int> ranges_left_{0};  // 0: nothing to fetch
  std::atomic<int64_t> next_piece_{0};
  // The current job. Written before open_ becomes true, read only by active threads.
  std::atomic<bool> open_{false};
  std::atomic<int> active_{0};
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
};

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int n = std::atoi(text);
    if (n > 0) return std::min(n, kMaxThreads);
  }
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return 1;
}

std::mutex pool_mutex;       // held while a job runs: one job at a time
ThreadPool* pool = nullptr;  // made at first use; leaked at exit, when its threads may already be gone
std::atomic<int> wanted_threads{0};

// The child of a fork has no worker threads: it forgets the pool, whose memory is leaked, and makes its own.
void forget_pool_after_fork() {
  pool = nullptr;
  new (&pool_mutex) std::mutex();
}

}  // namespace

int num_threads() {
  int n = wanted_threads.load();
  if (n != 0) return n;
  const int found = default_threads();
  return wanted_threads.compare_exchange_strong(n, found) ? found : n;  // n: set by another thread meanwhile
}

void set_num_threads(int n) {
  if (n < 1 || n > kMaxThreads) {
    throw std::invalid_argument("n: expected 1 to " + std::to_string(kMaxThreads) + " threads, got " +
                                std::to_string(n));
  }
  wanted_threads.store(n);
}

void fetch_while_idle(const MemoryRange* ranges, int count) {
  std::unique_lock<std::mutex> lock(pool_mutex, std::defer_lock);
  if (lock.try_lock() && pool != nullptr) pool->fetch(ranges, std::min(count, kMostRanges));
}

namespace {

struct Pieces {
  int64_t count = 0;
  void (*body)(void*, int64_t) = nullptr;
  void* context = nullptr;
};
thread_local Pieces beside;  // of the next job

void run_job(int64_t count, void (*body)(void*, int64_t), void* context) {
  const int threads = num_threads();
  std::unique_lock<std::mutex> lock(pool_mutex, std::defer_lock);
  if (count <= 1 || threads == 1 || !lock.try_lock()) {
    for (int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  if (pool == nullptr || pool->wanted() != threads) {
    static std::once_flag registered;
    std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_pool_after_fork); });
    delete pool;
    pool = new ThreadPool(threads);
  }
  pool->run(count, body, context);
}

}  // namespace

void run_beside_next(int64_t count, void (*body)(void*, int64_t), void* context) { beside = {count, body, context}; }

void run_parallel(int64_t count, void (*body)(void*, int64_t), void* context) {
  if (beside.count == 0) return run_job(count, body, context);
  Pieces both[2] = {beside, {count, body, context}};
  beside = {};
  const auto either = [](void* pieces, int64_t i) {
    const Pieces* of = static_cast<const Pieces*>(pieces);
    const int64_t all = of[0].count + of[1].count, before = i * of[0].count / all;  // spread evenly over the threads
    (i + 1) * of[0].count / all > before ? of[0].body(of[0].context, before) : of[1].body(of[1].context, i - before);
  };
  run_job(both[0].count + count, either, both);
}

}  // namespace specengine
