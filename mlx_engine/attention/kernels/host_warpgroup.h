// The matrix instructions of `cuda_warpgroup.h`, on the host, which reads shared memory where the hardware would.
namespace quire {

template <typename T>
struct WideMatrix {
  // What the hardware takes for an element of the matrix: by its descriptor's fields, in the layout of lines of 128 bytes
  // (the only one here), whose pieces of 16 bytes are exchanged by the address's bits 7 to 9.
  static float at(MatrixPlace place, int line, int column) {
    const unsigned begin = (place & 0x3fff) * 16;
    const unsigned eight_lines = (place >> 32 & 0x3fff) * 16;
    if (place >> 62 != 1 || (place >> 49 & 7) != 0) {
      return NAN;
    }
    unsigned address = begin + line / 8 * eight_lines + line % 8 * 128 + column * 2;
    address ^= (address >> 7 & 7) << 4;
    T value;
    std::memcpy(&value, reinterpret_cast<const char*>(dynamic_shared()) + address - 1024, 2);
    return float(value);
  }

  template <typename Element>
  static void multiply(float (*sums)[4], const unsigned (&rows)[4], bool keep, const Element& element) {
    uint32_t all[32][4];
    simt::Threadgroup::current_group()->exchange(rows, all);
    for (int i = 0; i < 32; ++i) {
      const int row = QUIRE_LANE / 4 + i % 4 / 2 * 8;
      const int column = i / 4 * 8 + QUIRE_LANE % 4 * 2 + i % 2;
      float sum = keep ? sums[i / 4][i % 4] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        const uint32_t(&owner)[4] = all[row % 8 * 4 + k % 8 / 2];
        sum += Matrix<T>::half(owner[row / 8 + k / 8 * 2], k % 2) * element(k, column);
      }
      sums[i / 4][i % 4] = sum;
    }
  }

  static void multiply_lines(float (*sums)[4], const unsigned (&rows)[4], MatrixPlace place, bool keep) {
    multiply(sums, rows, keep, [&](int k, int column) { return at(place, column, k); });
  }
  static void multiply_columns(float (*sums)[4], const unsigned (&rows)[4], MatrixPlace place, bool keep) {
    multiply(sums, rows, keep, [&](int k, int column) { return at(place, k, column); });
  }
};

inline void publish_copies() {}
inline void begin_products() {}
inline void end_products() {}
template <int LEFT>
void wait_for_products() {}
template <typename Value>
void pin(Value&) {}

}  // namespace quire
