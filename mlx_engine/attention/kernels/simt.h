// Runs a threadgroup of a GPU kernel on one thread of the host: every lane is a fiber, and gives way to the next where
// lanes meet (barriers, shuffles). A kernel whose lanes don't all arrive at a meeting is reported, not left hanging.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace simt {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

class Threadgroup {
 public:
  // Calls kernel() once for each of num_threads lanes, as many in each call; false if lanes waited for others that had
  // ended.
  bool run(int num_threads, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    exchange_.assign(2 * num_threads, 0.0f);
    for (int i = int(fibers_.size()); i < num_threads; ++i) {
      stacks_.emplace_back(kStackBytes);
      fibers_.emplace_back();
      ucontext_t& context = fibers_[i].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_[i].data();
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = nullptr;
      makecontext(&context, &Threadgroup::enter, 0);
    }
    for (Fiber& fiber : fibers_) {
      fiber.state = State::kReady;
      fiber.num_shuffles = 0;
    }
    current_group() = this;
    for (int left = num_threads; left > 0;) {
      bool moved = false;
      for (int i = 0; i < num_threads; ++i) {
        if (fibers_[i].state != State::kReady) {
          continue;
        }
        moved = true;
        lane_ = i;
        go_on(fibers_[i]);
        left -= fibers_[i].state == State::kEnded;
      }
      moved |= release_warps();
      if (!moved && !release_barrier()) {
        return false;
      }
    }
    return true;
  }

  int index() const { return lane_; }

  void barrier() { wait(State::kAtBarrier); }

  float shuffle_xor(float value, int mask) {
    // Two places a lane, taken in turn: a fast lane may be at the next shuffle while a slow one still reads.
    Fiber& fiber = fibers_[lane_];
    const int turn = fiber.num_shuffles++ % 2;
    exchange_[2 * lane_ + turn] = value;
    const int lane = lane_;
    wait(State::kAtShuffle);
    return exchange_[2 * (lane ^ mask) + turn];
  }

  // What every lane of the warp has.
  template <size_t N>
  void exchange(const uint32_t (&mine)[N], uint32_t (&all)[32][N]) {
    Fiber& fiber = fibers_[lane_];
    const int turn = fiber.num_shuffles++ % 2;
    words_.resize(2 * kMostWords * fibers_.size());
    static_assert(N <= kMostWords);
    uint32_t* place = words_.data() + turn * kMostWords * fibers_.size();
    std::copy(mine, mine + N, place + lane_ * kMostWords);
    const int first = lane_ / 32 * 32;
    wait(State::kAtShuffle);
    for (int lane = 0; lane < 32; ++lane) {
      std::copy_n(place + (first + lane) * kMostWords, N, all[lane]);
    }
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

  static void enter() {
    Threadgroup* group = current_group();
    // A fiber is made once: the next threadgroup's kernel runs on it too.
    for (;;) {
      (*group->kernel_)();
      group->wait(State::kEnded);
    }
  }

  // Lets a fiber run until it waits or ends.
  void go_on(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) {
      return;
    }
    if (fiber.begun) {
      _longjmp(fiber.place, 1);
    }
    fiber.begun = true;
    setcontext(&fiber.context);
  }

  void wait(State state) {
    Fiber& fiber = fibers_[lane_];
    fiber.state = state;
    if (_setjmp(fiber.place) == 0) {
      _longjmp(scheduler_, 1);
    }
  }

  // A warp goes on when all its 32 lanes are at a shuffle.
  bool release_warps() {
    bool any = false;
    for (size_t first = 0; first < fibers_.size(); first += 32) {
      const size_t end = std::min(first + 32, fibers_.size());
      bool all = end - first == 32;
      for (size_t i = first; i < end; ++i) {
        all = all && fibers_[i].state == State::kAtShuffle &&
              fibers_[i].num_shuffles == fibers_[first].num_shuffles;
      }
      for (size_t i = first; all && i < end; ++i) {
        fibers_[i].state = State::kReady;
        any = true;
      }
    }
    return any;
  }

  bool release_barrier() {
    for (const Fiber& fiber : fibers_) {
      if (fiber.state != State::kAtBarrier) {
        return false;
      }
    }
    for (Fiber& fiber : fibers_) {
      fiber.state = State::kReady;
    }
    return true;
  }

  const std::function<void()>* kernel_ = nullptr;
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

// Runs kernel() over grid (in threads, as MLX counts it) in threadgroups; false where lanes don't meet.
inline bool launch(Dim3 grid, Dim3 threads, const std::function<void()>& kernel) {
  Place& here = place();
  here.threads = threads;
  here.groups = {(grid.x + threads.x - 1) / threads.x, grid.y, grid.z};
  Threadgroup group;
  for (unsigned z = 0; z < here.groups.z; ++z) {
    for (unsigned y = 0; y < here.groups.y; ++y) {
      for (unsigned x = 0; x < here.groups.x; ++x) {
        here.group = {x, y, z};
        if (!group.run(int(threads.x), kernel)) {
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace simt
