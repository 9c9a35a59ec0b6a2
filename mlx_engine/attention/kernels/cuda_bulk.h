// Bulk copies into shared memory, in CUDA (compute capability 9.0 on).
namespace quire {

// Where lanes wait for copies. A phase of it ends when all bytes have come that were expected; the first is phase 0.
typedef unsigned long long Arrivals;

// Of several, by one thread each; then `publish_arrivals` by it, and a barrier.
__device__ inline void begin_arrivals(Arrivals* arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrivals)) : "memory");
}
__device__ inline void publish_arrivals() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// By one thread, once in a phase.
__device__ inline void expect_bytes(Arrivals* arrivals, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrivals)), "r"(bytes)
               : "memory");
}

// Bytes and both addresses are multiples of 16.
template <typename T>
__device__ inline void copy_bulk(Raw* target, const T* source, int bytes, Arrivals* arrivals) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(source), "r"(bytes), "r"(shared_address(arrivals))
               : "memory");
}

// Until the phase of this parity has ended. By all lanes of a warp.
__device__ inline void await_bytes(Arrivals* arrivals, int parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred ended;\nmbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\nselp.u32 %0, 1, 0, ended;\n}"
        : "=r"(done)
        : "r"(shared_address(arrivals)), "r"(parity)
        : "memory");
  }
}

// What all lanes of a warp have alike, known as such to the compiler.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// One lane of the warp, known as such to the compiler.
__device__ inline bool is_elected() {
  unsigned elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(elected));
  return elected != 0;
}

__device__ inline void meet_warp() { __syncwarp(); }

}  // namespace quire
