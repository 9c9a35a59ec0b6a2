// The words of the kernels' common text, in Metal.
#define QUIRE_FUNCTION inline
#define QUIRE_DEVICE device
#define QUIRE_SHARED threadgroup
#define QUIRE_WRITABLE(type, pointer) ((device type*)(pointer))
// Whether 16 bytes are known to be readable there at once.
#define QUIRE_ALIGNED(pointer) false
#define QUIRE_UNROLL _Pragma("clang loop unroll(full)")
#define QUIRE_BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)
#define QUIRE_LANE int(quire_lane)
#define QUIRE_WARP int(quire_warp)
#define QUIRE_THREAD int(quire_thread.x)
#define QUIRE_THREADS int(quire_threads.x)
#define QUIRE_GROUP_X int(quire_group.x)
#define QUIRE_GROUP_Y int(quire_group.y)
#define QUIRE_GROUP_Z int(quire_group.z)
#define QUIRE_GROUPS_X int(quire_groups.x)
#define QUIRE_GROUPS_Z int(quire_groups.z)
// Integers in shared memory that all lanes may add to.
#define QUIRE_COUNTER atomic_uint
#define QUIRE_RESET(counter) atomic_store_explicit(&(counter), 0u, memory_order_relaxed)
#define QUIRE_COUNT(counter, amount) atomic_fetch_add_explicit(&(counter), amount, memory_order_relaxed)
#define QUIRE_COUNTED(counter) atomic_load_explicit(&(counter), memory_order_relaxed)
// Kernels run one after the other: see cuda.h.
#define QUIRE_NEXT_MAY_START() (void)0
#define QUIRE_AWAIT_PREVIOUS() (void)0

namespace quire {

constant constexpr float LOG2_E = 1.44269504088896341f;

typedef uint4 Raw;

template <typename T>
inline Raw load16(const device T* source) {
  return *(const device uint4*)(source);
}

template <typename T>
inline void store16(device T* target, Raw raw) {
  *(device uint4*)(target) = raw;
}

// Of what is read once.
template <typename T>
inline Raw load16_once(const device T* source) {
  return load16(source);
}

inline Raw zero16() { return uint4(0); }

template <typename T>
struct Piece;

template <>
struct Piece<float> {
  static inline void unpack(Raw raw, thread float (&out)[4]) {
    for (int i = 0; i < 4; ++i) {
      out[i] = as_type<float>(raw[i]);
    }
  }
};

template <>
struct Piece<bfloat16_t> {
  static inline void unpack(Raw raw, thread float (&out)[8]) {
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = as_type<float>(raw[i] << 16);
      out[2 * i + 1] = as_type<float>(raw[i] & 0xffff0000u);
    }
  }
};

template <>
struct Piece<half> {
  static inline void unpack(Raw raw, thread float (&out)[8]) {
    for (int i = 0; i < 4; ++i) {
      const half2 pair = as_type<half2>(raw[i]);
      out[2 * i] = float(pair.x);
      out[2 * i + 1] = float(pair.y);
    }
  }
};

template <>
struct Piece<int8_t> {
  static inline void unpack(Raw raw, thread float (&out)[16]) {
    for (int i = 0; i < 16; ++i) {
      out[i] = float(int8_t(raw[i / 4] >> 8 * (i % 4)));
    }
  }
};

inline float shuffle_xor(float value, int mask) { return simd_shuffle_xor(value, ushort(mask)); }
inline float exp2(float x) { return metal::exp2(x); }
inline float rint(float x) { return metal::rint(x); }
inline float tanh(float x) { return metal::precise::tanh(x); }
inline float rsqrt(float x) { return metal::rsqrt(x); }

}  // namespace quire
