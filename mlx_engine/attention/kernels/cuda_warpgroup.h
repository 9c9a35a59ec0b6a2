// The matrix instructions of four warps, in CUDA (compute capability 9.0 only). They run on while the threads go on: the
// compiler must not touch their registers meanwhile, nor move what reads their results before what waits for them.
#define QUIRE_SUMS_4(sums) "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
#define QUIRE_SUMS_32(sums)                                                                              \
  QUIRE_SUMS_4(sums[0]), QUIRE_SUMS_4(sums[1]), QUIRE_SUMS_4(sums[2]), QUIRE_SUMS_4(sums[3]), \
      QUIRE_SUMS_4(sums[4]), QUIRE_SUMS_4(sums[5]), QUIRE_SUMS_4(sums[6]), QUIRE_SUMS_4(sums[7])
#define QUIRE_PRODUCT(type, transposed)                                                                \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
               "%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, " transposed ";}"                        \
               : QUIRE_SUMS_32(sums)                                                                    \
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(place), "r"(int(keep)))

namespace quire {

// sums [64, 64] (+)= rows [64, 16] times the matrix of `matrix_place`: its lines as columns, or its lines as they are.
template <typename T>
struct WideMatrix;

#define QUIRE_WIDE_MATRIX(T, type)                                                                                     \
  template <>                                                                                                          \
  struct WideMatrix<T> {                                                                                               \
    __device__ static inline void multiply_lines(float (*sums)[4], const unsigned (&rows)[4], MatrixPlace place,       \
                                                 bool keep) {                                                          \
      QUIRE_PRODUCT(type, "0");                                                                                        \
    }                                                                                                                  \
    __device__ static inline void multiply_columns(float (*sums)[4], const unsigned (&rows)[4], MatrixPlace place,     \
                                                   bool keep) {                                                        \
      QUIRE_PRODUCT(type, "1");                                                                                        \
    }                                                                                                                  \
  };
QUIRE_WIDE_MATRIX(__nv_bfloat16, "bf16")
QUIRE_WIDE_MATRIX(__half, "f16")

// Copies into shared memory are seen by these instructions from here on.
__device__ inline void publish_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ inline void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ inline void pin(unsigned& value) { asm volatile("" : "+r"(value)::"memory"); }

}  // namespace quire
