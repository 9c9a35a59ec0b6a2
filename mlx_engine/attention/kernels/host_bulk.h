// The bulk copies of `cuda_bulk.h`, on the host: they come at once.
#include <cstdio>
#include <cstdlib>

namespace quire {

struct Arrivals {
  int missing, parity;
};

inline void begin_arrivals(Arrivals* arrivals) { *arrivals = Arrivals{0, 0}; }
inline void publish_arrivals() {}
inline void expect_bytes(Arrivals* arrivals, int bytes) { arrivals->missing += bytes; }

template <typename T>
void copy_bulk(Raw* target, const T* source, int bytes, Arrivals* arrivals) {
  std::memcpy(target, source, bytes);
  arrivals->missing -= bytes;
  if (arrivals->missing == 0) {
    arrivals->parity ^= 1;
  }
}

inline int uniform(int value) { return value; }
inline bool is_elected() { return QUIRE_LANE == 0; }

inline void meet_warp() { shuffle_xor(0.0f, 1); }

inline void await_bytes(Arrivals* arrivals, int parity) {
  meet_warp();
  if (arrivals->missing != 0 || arrivals->parity == parity) {
    std::fprintf(stderr, "%d bytes are missing in phase %d of a copy: a GPU would wait forever\n", arrivals->missing, parity);
    std::abort();
  }
}

}  // namespace quire
