#include "thread_pool.h"

#include <algorithm>
#include <thread>

namespace quire {
namespace {

// How long a thread looks for work or for the end of a job before it gives its core away, in turns of a loop of about
// 10 ns. The operations between two products of a decode step take longer, and want the core.
constexpr int kSpins = 1000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  static auto* pool = new ThreadPool();
  return *pool;
}

void ThreadPool::set_num_threads(int num_threads) {
  num_threads_.store(std::clamp(num_threads, 1, kMaxThreads), std::memory_order_relaxed);
}

void ThreadPool::parallel_for(uint32_t num_items, const std::function<void(uint32_t)>& body) {
  std::unique_lock lock(job_mutex_, std::try_to_lock);
  const int num_threads = this->num_threads();
  if (!lock.owns_lock() || num_threads == 1 || num_items < 2) {
    for (uint32_t i = 0; i < num_items; ++i) {
      body(i);
    }
    return;
  }
  start_threads(num_threads);
  body_ = &body;
  unfinished_.store(num_items, std::memory_order_relaxed);
  unclaimed_.store(num_items, std::memory_order_release);
  jobs_.fetch_add(1, std::memory_order_release);
  jobs_.notify_all();
  drain();
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0;) {
    if (++spins < kSpins) {
      relax();
    } else {
      // A thread of ours holds an item without a core to run it on.
      std::this_thread::yield();
    }
  }
}

void ThreadPool::drain() {
  uint32_t left = unclaimed_.load(std::memory_order_acquire);
  while (left != 0) {
    if (!unclaimed_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    // The job can't end before this item has, so body_ is this job's.
    (*body_)(left - 1);
    unfinished_.fetch_sub(1, std::memory_order_release);
    left = unclaimed_.load(std::memory_order_acquire);
  }
}

void ThreadPool::start_threads(int wanted) {
  for (; num_started_ < wanted; ++num_started_) {
    std::thread(&ThreadPool::work, this, num_started_).detach();
  }
}

void ThreadPool::work(int index) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t now = jobs_.load(std::memory_order_acquire);
    for (int spins = 0; now == seen && spins < kSpins; ++spins) {
      relax();
      now = jobs_.load(std::memory_order_acquire);
    }
    if (now == seen) {
      jobs_.wait(seen, std::memory_order_acquire);
      continue;
    }
    seen = now;
    if (index < num_threads()) {
      drain();
    }
  }
}

}  // namespace quire
