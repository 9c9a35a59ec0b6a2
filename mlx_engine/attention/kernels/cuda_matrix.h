// Matrix instructions of a warp, in CUDA (compute capability 8.0 on).
namespace quire {

__device__ inline bool any(bool value) { return __any_sync(0xffffffffu, value); }

__device__ inline float greater(float one, float two) { return fmaxf(one, two); }

// What another lane of the warp has.
__device__ inline float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// In one instruction, right to about 22 bits.
__device__ inline float fast_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ inline void split(Raw raw, unsigned (&words)[4]) {
  words[0] = raw.x;
  words[1] = raw.y;
  words[2] = raw.z;
  words[3] = raw.w;
}

__device__ inline Raw join(const unsigned (&words)[4]) { return make_uint4(words[0], words[1], words[2], words[3]); }

// The low halves of two words as one, or the high ones.
__device__ inline unsigned low_halves(unsigned one, unsigned two) { return __byte_perm(one, two, 0x5410); }
__device__ inline unsigned high_halves(unsigned one, unsigned two) { return __byte_perm(one, two, 0x7632); }

// Two 16-bit numbers.
template <typename T>
__device__ inline unsigned load4(const T* source) {
  return *reinterpret_cast<const unsigned*>(source);
}
template <typename T>
__device__ inline void store4(T* target, unsigned word) {
  *reinterpret_cast<unsigned*>(target) = word;
}

// Words of 4 bytes, two or four of them read at once; 0 where they aren't wanted.
template <typename T>
__device__ inline void load_words(const T* source, bool wanted, unsigned (&words)[2]) {
  const uint2 raw = wanted ? *reinterpret_cast<const uint2*>(source) : make_uint2(0, 0);
  words[0] = raw.x;
  words[1] = raw.y;
}
template <typename T>
__device__ inline void load_words(const T* source, bool wanted, unsigned (&words)[4]) {
  split(wanted ? load16(source) : zero16(), words);
}

__device__ inline unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

// Copies 16 bytes into shared memory, or puts zeros there, while the threads go on; then `end_copies`, and
// `wait_for_copies` for all but the LEFT times that copies were ended last.
template <typename T>
__device__ inline void copy16(Raw* target, const T* source, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
               "r"(wanted ? 16 : 0));
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;"); }
template <int LEFT>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four matrices of 8 times 8 16-bit numbers in shared memory: lanes 8 i to 8 i + 7 name the rows of the i-th. Lane l gets
// of each the columns 2 (l % 4) and one more of row l / 4; transposed, the rows 2 (l % 4) and one more of column l / 4.
__device__ inline void load_matrices(const Raw* row, unsigned (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_transposed(const Raw* row, unsigned (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

template <typename T>
struct Matrix;

template <>
struct Matrix<__nv_bfloat16> {
  __device__ static inline unsigned pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
  __device__ static inline void multiply_add(float (&sums)[4], const unsigned (&rows)[4], unsigned one, unsigned two) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(one), "r"(two));
  }
};

template <>
struct Matrix<__half> {
  __device__ static inline unsigned pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
  __device__ static inline void multiply_add(float (&sums)[4], const unsigned (&rows)[4], unsigned one, unsigned two) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(one), "r"(two));
  }
};

typedef __half Half;

// Four signed bytes as float16, exactly: the first and the third, the second and the fourth.
__device__ inline void widen(unsigned bytes, unsigned& even, unsigned& odd) {
  // 1024 + 128 + the byte, less 1024 + 128. In one instruction: (bytes & 0x00ff00ff) ^ 0x64806480.
  unsigned biased[2];
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(biased[0]) : "r"(bytes), "r"(0x00ff00ffu), "r"(0x64806480u));
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(biased[1]) : "r"(bytes >> 8), "r"(0x00ff00ffu), "r"(0x64806480u));
  const __half2 offset = __float2half2_rn(1152.0f);
  const __half2 numbers[2] = {__hsub2(*reinterpret_cast<const __half2*>(&biased[0]), offset),
                              __hsub2(*reinterpret_cast<const __half2*>(&biased[1]), offset)};
  even = *reinterpret_cast<const unsigned*>(&numbers[0]);
  odd = *reinterpret_cast<const unsigned*>(&numbers[1]);
}

// Of signed bytes, in integers: 32 numbers a row, of which a word has four.
__device__ inline void multiply_add_bytes(int (&sums)[4], const unsigned (&rows)[4], unsigned one, unsigned two) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(one), "r"(two));
}

}  // namespace quire
