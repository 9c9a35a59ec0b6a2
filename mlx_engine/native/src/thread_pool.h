// A few threads that live as long as the process and share out the items of one job at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>

namespace quire {

class ThreadPool {
 public:
  // The process's pool. Never destroyed: its threads may still be asleep when the process ends.
  static ThreadPool& instance();

  // How many threads work on a job, the caller's included. Only lowers or raises the number for later jobs: threads
  // beyond it stay asleep. At least 1, at most kMaxThreads.
  void set_num_threads(int num_threads);
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // Calls body(i) once for each i in [0, num_items), on any thread in any order, and returns when all have returned.
  // Items are claimed one by one, so a thread that the system takes its core from holds back one item only. While
  // another job runs, the caller does all its items itself. body must not throw.
  void parallel_for(uint32_t num_items, const std::function<void(uint32_t)>& body);

  static constexpr int kMaxThreads = 256;

 private:
  ThreadPool() = default;

  void start_threads(int wanted);
  void work(int index);
  // Claims and does items until none is left unclaimed.
  void drain();

  std::mutex job_mutex_;  // held by the caller of parallel_for for as long as its job runs
  std::atomic<int> num_threads_{1};
  int num_started_ = 1;  // the caller counts as one

  // Written by the caller before its job's items can be claimed; read by whoever has claimed one.
  const std::function<void(uint32_t)>* body_ = nullptr;
  alignas(64) std::atomic<uint32_t> unclaimed_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> jobs_{0};  // what sleeping threads wait for a change of
};

}  // namespace quire
