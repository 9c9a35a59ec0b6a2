// The fibers of simt.h. Compiled once, not with each kernel: it would take most of a kernel's time to compile.
#include "simt.h"

#include <algorithm>

namespace simt {

bool Threadgroup::run(int num_threads, const Kernel& kernel) {
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

float Threadgroup::shuffle_xor(float value, int mask) {
  // Two places a lane, taken in turn: a fast lane may be at the next shuffle while a slow one still reads.
  Fiber& fiber = fibers_[lane_];
  const int turn = fiber.num_shuffles++ % 2;
  exchange_[2 * lane_ + turn] = value;
  const int lane = lane_;
  wait(State::kAtShuffle);
  return exchange_[2 * (lane ^ mask) + turn];
}

void Threadgroup::exchange(const uint32_t* mine, uint32_t* all, size_t num_words) {
  Fiber& fiber = fibers_[lane_];
  const int turn = fiber.num_shuffles++ % 2;
  words_.resize(2 * kMostWords * fibers_.size());
  uint32_t* place = words_.data() + turn * kMostWords * fibers_.size();
  std::copy_n(mine, num_words, place + lane_ * kMostWords);
  const int first = lane_ / 32 * 32;
  wait(State::kAtShuffle);
  for (int lane = 0; lane < 32; ++lane) {
    std::copy_n(place + (first + lane) * kMostWords, num_words, all + lane * num_words);
  }
}

void Threadgroup::enter() {
  Threadgroup* group = current_group();
  // A fiber is made once: the next threadgroup's kernel runs on it too.
  for (;;) {
    group->kernel_->call(group->kernel_->context);
    group->wait(State::kEnded);
  }
}

void Threadgroup::go_on(Fiber& fiber) {
  if (_setjmp(scheduler_) != 0) {
    return;
  }
  if (fiber.begun) {
    _longjmp(fiber.place, 1);
  }
  fiber.begun = true;
  setcontext(&fiber.context);
}

void Threadgroup::wait(State state) {
  Fiber& fiber = fibers_[lane_];
  fiber.state = state;
  if (_setjmp(fiber.place) == 0) {
    _longjmp(scheduler_, 1);
  }
}

bool Threadgroup::release_warps() {
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

bool Threadgroup::release_barrier() {
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

bool launch(Dim3 grid, Dim3 threads, const Kernel& kernel) {
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
