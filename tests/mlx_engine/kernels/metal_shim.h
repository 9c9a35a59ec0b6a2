// As much of the Metal language as the kernels use, for a C++ compiler: address spaces, vectors, bit casts, simdgroups
// of 32 and threadgroups (run by simt.h), half and bfloat. What it can't stand for: Apple's compiler, and speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half_types.h"
#include "simt.h"

typedef unsigned int uint;
typedef unsigned short ushort;
typedef half_types::float16 half;
typedef half float16_t;
typedef half_types::bfloat16 bfloat16_t;

struct uint3 {
  uint x, y, z;
};

struct uint4 {
  uint words[4];
  uint4() = default;
  explicit uint4(uint all) : words{all, all, all, all} {}
  uint& operator[](int i) { return words[i]; }
  uint operator[](int i) const { return words[i]; }
};
static_assert(sizeof(uint4) == 16);

struct half2 {
  half x, y;
};

template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

enum mem_flags_values { mem_none = 0, mem_threadgroup_bit = 1, mem_device_bit = 2 };
struct mem_flags {
  static constexpr int mem_threadgroup = mem_threadgroup_bit;
  static constexpr int mem_device = mem_device_bit;
};

// A barrier that forgets memory shared through the device would be a race on a GPU; here it would not show.
inline void threadgroup_barrier(int flags) {
  if (flags != (mem_flags::mem_threadgroup | mem_flags::mem_device)) {
    throw "a barrier without both kinds of memory";
  }
  simt::Threadgroup::current_group()->barrier();
}

inline float simd_shuffle_xor(float value, ushort mask) {
  return simt::Threadgroup::current_group()->shuffle_xor(value, mask);
}

// Lanes take turns, so nothing has to be atomic; a plain operator on one of these doesn't compile, as in Metal.
struct atomic_uint {
  uint value_;
};
enum memory_order { memory_order_relaxed };
inline uint atomic_load_explicit(const atomic_uint* counter, memory_order) { return counter->value_; }
inline void atomic_store_explicit(atomic_uint* counter, uint value, memory_order) { counter->value_ = value; }
inline uint atomic_fetch_add_explicit(atomic_uint* counter, uint amount, memory_order) {
  const uint before = counter->value_;
  counter->value_ += amount;
  return before;
}

namespace metal {
inline float exp2(float x) { return std::exp2(x); }
inline float rint(float x) { return std::rint(x); }
namespace precise {
inline float tanh(float x) { return std::tanh(x); }
}  // namespace precise
}  // namespace metal
using namespace metal;

inline uint3 shim_dim(simt::Dim3 d) { return {d.x, d.y, d.z}; }

// What a kernel's attributes stand for, as MLX declares them.
#define thread_index_in_simdgroup_value uint(simt::Threadgroup::current_group()->index() % 32)
#define simdgroup_index_in_threadgroup_value uint(simt::Threadgroup::current_group()->index() / 32)
#define thread_position_in_threadgroup_value (uint3{uint(simt::Threadgroup::current_group()->index()), 0, 0})
#define threads_per_threadgroup_value shim_dim(simt::place().threads)
#define threadgroup_position_in_grid_value shim_dim(simt::place().group)
#define threadgroups_per_grid_value shim_dim(simt::place().groups)

#define device
#define constant
#define thread
#define threadgroup static thread_local
