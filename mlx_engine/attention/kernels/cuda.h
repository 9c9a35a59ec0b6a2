// The words of the kernels' common text, in CUDA.
#define QUIRE_FUNCTION __device__ inline
#define QUIRE_DEVICE
#define QUIRE_SHARED __shared__
// 16-byte pieces of shared memory, as many as the kernel is launched with.
#define QUIRE_DYNAMIC_SHARED(name, pieces) extern __shared__ __align__(1024) uint4 name[]
#define QUIRE_WRITABLE(type, pointer) const_cast<type*>(pointer)
// Whether 16 bytes may be read there at once.
#define QUIRE_ALIGNED(pointer) (reinterpret_cast<unsigned long long>(pointer) % 16 == 0)
#define QUIRE_UNROLL _Pragma("unroll")
#define QUIRE_BARRIER() __syncthreads()
#define QUIRE_LANE int(threadIdx.x % 32)
#define QUIRE_WARP int(threadIdx.x / 32)
#define QUIRE_THREAD int(threadIdx.x)
#define QUIRE_THREADS int(blockDim.x)
#define QUIRE_GROUP_X int(blockIdx.x)
#define QUIRE_GROUP_Y int(blockIdx.y)
#define QUIRE_GROUP_Z int(blockIdx.z)
#define QUIRE_GROUPS_X int(gridDim.x)
#define QUIRE_GROUPS_Z int(gridDim.z)
// Integers in shared memory that all lanes may add to.
#define QUIRE_COUNTER unsigned
#define QUIRE_RESET(counter) (counter) = 0
#define QUIRE_COUNT(counter, amount) atomicAdd(&(counter), amount)
#define QUIRE_COUNTED(counter) (counter)
// A recorded step may start a kernel while the one before it still runs (graphs.cpp). Every kernel says at once that
// the next may start, whose threadgroups take the places that this one's leave, and touches nothing that other kernels
// write until those before it have ended. Each threadgroup waits, those too that have nothing to do: so a kernel that
// has ended comes after all that it builds on. Elsewhere both words do nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define QUIRE_NEXT_MAY_START() asm volatile("griddepcontrol.launch_dependents;")
#define QUIRE_AWAIT_PREVIOUS() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define QUIRE_NEXT_MAY_START() (void)0
#define QUIRE_AWAIT_PREVIOUS() (void)0
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace quire {

constexpr float LOG2_E = 1.44269504088896341f;

typedef uint4 Raw;

template <typename T>
__device__ inline Raw load16(const T* source) {
  return *reinterpret_cast<const uint4*>(source);
}

template <typename T>
__device__ inline void store16(T* target, Raw raw) {
  *reinterpret_cast<uint4*>(target) = raw;
}

// Of what is read once: it need not stay in a cache.
template <typename T>
__device__ inline Raw load16_once(const T* source) {
  return __ldcs(reinterpret_cast<const uint4*>(source));
}

__device__ inline Raw zero16() { return make_uint4(0, 0, 0, 0); }

template <typename T>
struct Piece;

template <>
struct Piece<float> {
  __device__ static inline void unpack(Raw raw, float (&out)[4]) {
    out[0] = __uint_as_float(raw.x);
    out[1] = __uint_as_float(raw.y);
    out[2] = __uint_as_float(raw.z);
    out[3] = __uint_as_float(raw.w);
  }
};

template <>
struct Piece<__nv_bfloat16> {
  __device__ static inline void unpack(Raw raw, float (&out)[8]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

template <>
struct Piece<__half> {
  __device__ static inline void unpack(Raw raw, float (&out)[8]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
};

template <>
struct Piece<int8_t> {
  __device__ static inline void unpack(Raw raw, float (&out)[16]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    QUIRE_UNROLL
    for (int i = 0; i < 16; ++i) {
      // 2^23 + 128 + the byte, less 2^23 + 128: exact, and no conversion, of which a GPU does few at once.
      const unsigned biased = words[i / 4] ^ 0x80808080u;
      out[i] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7540 + i % 4)) - 8388736.0f;
    }
  }
};

__device__ inline float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
__device__ inline float exp2(float x) { return exp2f(x); }
__device__ inline float rint(float x) { return rintf(x); }
__device__ inline float tanh(float x) { return tanhf(x); }
__device__ inline float rsqrt(float x) { return rsqrtf(x); }

}  // namespace quire
