// The words of the kernels' common text on the host, where `simt.h` runs threadgroups. For tests: arithmetic, not speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half_types.h"
#include "simt.h"

#define QUIRE_FUNCTION inline
#define QUIRE_DEVICE
#define QUIRE_SHARED static thread_local
#define QUIRE_DYNAMIC_SHARED(name, pieces)                     \
  alignas(1024) static thread_local quire::Raw name[pieces]; \
  quire::dynamic_shared() = name
#define QUIRE_WRITABLE(type, pointer) const_cast<type*>(pointer)
// Whether 16 bytes may be read there at once.
#define QUIRE_ALIGNED(pointer) (reinterpret_cast<uintptr_t>(pointer) % 16 == 0)
#define QUIRE_UNROLL
#define QUIRE_BARRIER() simt::Threadgroup::current_group()->barrier()
#define QUIRE_LANE (simt::Threadgroup::current_group()->index() % 32)
#define QUIRE_WARP (simt::Threadgroup::current_group()->index() / 32)
#define QUIRE_THREAD (simt::Threadgroup::current_group()->index())
#define QUIRE_THREADS int(simt::place().threads.x)
#define QUIRE_GROUP_X int(simt::place().group.x)
#define QUIRE_GROUP_Y int(simt::place().group.y)
#define QUIRE_GROUP_Z int(simt::place().group.z)
#define QUIRE_GROUPS_X int(simt::place().groups.x)
#define QUIRE_GROUPS_Z int(simt::place().groups.z)
// Integers in shared memory that all lanes may add to. Lanes take turns.
#define QUIRE_COUNTER uint32_t
#define QUIRE_RESET(counter) (counter) = 0
#define QUIRE_COUNT(counter, amount) (counter) += amount
#define QUIRE_COUNTED(counter) (counter)
// Kernels run one after the other: see cuda.h.
#define QUIRE_NEXT_MAY_START() (void)0
#define QUIRE_AWAIT_PREVIOUS() (void)0

namespace quire {

constexpr float LOG2_E = 1.44269504088896341f;

using half_types::bfloat16;
using half_types::float16;

struct Raw {
  uint32_t words[4];
};

// Where the running threadgroup's begins.
inline const Raw*& dynamic_shared() {
  static thread_local const Raw* begin;
  return begin;
}

template <typename T>
Raw load16(const T* source) {
  Raw raw;
  std::memcpy(&raw, source, 16);
  return raw;
}

template <typename T>
Raw load16_once(const T* source) {
  return load16(source);
}

template <typename T>
void store16(T* target, Raw raw) {
  std::memcpy(target, &raw, 16);
}

inline Raw zero16() { return Raw{{0, 0, 0, 0}}; }

template <typename T>
struct Piece {
  static void unpack(Raw raw, float (&out)[16 / sizeof(T)]) {
    T values[16 / sizeof(T)];
    std::memcpy(values, &raw, 16);
    for (size_t i = 0; i < 16 / sizeof(T); ++i) {
      out[i] = float(values[i]);
    }
  }
};

inline float shuffle_xor(float value, int mask) {
  return simt::Threadgroup::current_group()->shuffle_xor(value, mask);
}
inline float exp2(float x) { return std::exp2(x); }
inline float rint(float x) { return std::rint(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }

}  // namespace quire
