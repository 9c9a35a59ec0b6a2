// Runs a threadgroup of a GPU kernel on one thread of the host: every lane is a fiber, and gives way to the next where
// lanes meet (barriers, shuffles). A kernel whose lanes don't all arrive at a meeting is reported, not left hanging.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <vector>

namespace simt {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// What every lane calls.
struct Kernel {
  void (*call)(const void* context);
  const void* context;
};

class Threadgroup {
 public:
  // Calls the kernel once for each of num_threads lanes, as many in each call; false if lanes waited for others that had
  // ended.
  bool run(int num_threads, const Kernel& kernel);

  int index() const { return lane_; }

  void barrier() { wait(State::kAtBarrier); }

  float shuffle_xor(float value, int mask);

  // What every lane of the warp has.
  template <size_t N>
  void exchange(const uint32_t (&mine)[N], uint32_t (&all)[32][N]) {
    static_assert(N <= kMostWords);
    exchange(mine, &all[0][0], N);
  }

  static Threadgroup*& current_group() {
    static thread_local Threadgroup* group = nullptr;
    return group;
  }

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  static constexpr size_t kMostWords = 8;
  enum class State { kReady, kAtShuffle, kAtBarrier, kEnded };
  struct Fiber {
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it waits: unlike swapcontext, a jump doesn't ask the system for its signals
    bool begun = false;
    State state = State::kReady;
    int num_shuffles = 0;
  };

  void exchange(const uint32_t* mine, uint32_t* all, size_t num_words);
  static void enter();
  // Lets a fiber run until it waits or ends.
  void go_on(Fiber& fiber);
  void wait(State state);
  // A warp goes on when all its 32 lanes are at a shuffle.
  bool release_warps();
  bool release_barrier();

  const Kernel* kernel_ = nullptr;
  std::deque<Fiber> fibers_;  // a context must stay where it was made
  std::vector<std::vector<char>> stacks_;
  std::vector<float> exchange_;
  std::vector<uint32_t> words_;
  jmp_buf scheduler_;
  int lane_ = 0;
};

struct Place {
  Dim3 group, groups, threads;
};

inline Place& place() {
  static thread_local Place here;
  return here;
}

// Runs the kernel over grid (in threads, as MLX counts it) in threadgroups; false where lanes don't meet.
bool launch(Dim3 grid, Dim3 threads, const Kernel& kernel);

template <typename Function>
bool launch(Dim3 grid, Dim3 threads, const Function& function) {
  return launch(grid, threads,
                Kernel{[](const void* context) { (*static_cast<const Function*>(context))(); }, &function});
}

}  // namespace simt
