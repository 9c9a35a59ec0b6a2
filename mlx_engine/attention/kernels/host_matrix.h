// The warp's matrix instructions of `cuda_matrix.h`, on the host.
namespace quire {

inline bool any(bool value) {
  float all = value ? 1.0f : 0.0f;
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(all, mask);
    all = other > all ? other : all;
  }
  return all > 0.0f;
}

inline float greater(float one, float two) { return one > two ? one : two; }

inline float shuffle(float value, int lane) {
  uint32_t mine[1];
  std::memcpy(mine, &value, 4);
  uint32_t all[32][1];
  simt::Threadgroup::current_group()->exchange(mine, all);
  std::memcpy(&value, all[lane], 4);
  return value;
}

inline float fast_exp2(float x) { return std::exp2(x); }

inline void split(Raw raw, unsigned (&words)[4]) { std::memcpy(words, raw.words, 16); }

inline Raw join(const unsigned (&words)[4]) { return Raw{{words[0], words[1], words[2], words[3]}}; }

inline unsigned low_halves(unsigned one, unsigned two) { return (one & 0xffffu) | two << 16; }
inline unsigned high_halves(unsigned one, unsigned two) { return one >> 16 | (two & 0xffff0000u); }

template <typename T>
void copy16(Raw* target, const T* source, bool wanted) {
  *target = wanted ? load16(source) : zero16();
}
inline void end_copies() {}
template <int LEFT>
void wait_for_copies() {}

template <typename T>
unsigned load4(const T* source) {
  unsigned word;
  std::memcpy(&word, source, 4);
  return word;
}
template <typename T>
void store4(T* target, unsigned word) {
  std::memcpy(target, &word, 4);
}

template <typename T, size_t N>
void load_words(const T* source, bool wanted, unsigned (&words)[N]) {
  std::memset(words, 0, sizeof(words));
  if (wanted) {
    std::memcpy(words, source, sizeof(words));
  }
}

// As on GPUs, which keep the first 1,024 bytes for themselves.
inline unsigned shared_address(const Raw* pointer) { return 1024 + unsigned(pointer - dynamic_shared()) * 16; }

inline void load_matrices(const Raw* row, unsigned (&words)[4], bool transposed) {
  const uint64_t address = reinterpret_cast<uint64_t>(row);
  const uint32_t mine[2] = {uint32_t(address), uint32_t(address >> 32)};
  uint32_t all[32][2];
  simt::Threadgroup::current_group()->exchange(mine, all);
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int c = 0; c < 2; ++c) {
      const int line = transposed ? QUIRE_LANE % 4 * 2 + c : QUIRE_LANE / 4;
      const int column = transposed ? QUIRE_LANE / 4 : QUIRE_LANE % 4 * 2 + c;
      const uint32_t(&named)[2] = all[8 * i + line];
      std::memcpy(&pair[c], reinterpret_cast<const uint16_t*>(named[0] | uint64_t(named[1]) << 32) + column, 2);
    }
    words[i] = pair[0] | unsigned(pair[1]) << 16;
  }
}
inline void load_matrices(const Raw* row, unsigned (&words)[4]) { load_matrices(row, words, false); }
inline void load_transposed(const Raw* row, unsigned (&words)[4]) { load_matrices(row, words, true); }

// sums [16, 8] += rows [16, k] times columns [k, 8], of words of so many numbers: k is eight times as many. Lane l holds of
// rows those of l / 4 and 8 more, of columns that of l / 4, of sums the columns 2 (l % 4) and one more. `number` takes one
// out of a word.
template <int PER_WORD, typename Sum, typename Number>
void multiply_words(Sum (&sums)[4], const unsigned (&rows)[4], unsigned one, unsigned two, Number number) {
  const uint32_t mine[6] = {rows[0], rows[1], rows[2], rows[3], one, two};
  uint32_t all[32][6];
  simt::Threadgroup::current_group()->exchange(mine, all);
  const int lane = QUIRE_LANE;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8 * PER_WORD; ++k) {
      const int owner = k % (4 * PER_WORD) / PER_WORD;
      const int later = k / (4 * PER_WORD);
      sums[i] += number(all[row % 8 * 4 + owner][row / 8 + later * 2], k % PER_WORD) *
                 number(all[column * 4 + owner][4 + later], k % PER_WORD);
    }
  }
}

template <typename T>
struct Matrix {
  static unsigned pack(float low, float high) { return T(low).bits | unsigned(T(high).bits) << 16; }

  static float half(unsigned word, int place) {
    T value;
    value.bits = uint16_t(word >> 16 * place);
    return float(value);
  }

  static void multiply_add(float (&sums)[4], const unsigned (&rows)[4], unsigned one, unsigned two) {
    multiply_words<2>(sums, rows, one, two, half);
  }
};

using Half = float16;

inline int8_t byte_of(unsigned word, int place) { return int8_t(word >> 8 * place); }

inline void widen(unsigned bytes, unsigned& even, unsigned& odd) {
  even = Matrix<Half>::pack(byte_of(bytes, 0), byte_of(bytes, 2));
  odd = Matrix<Half>::pack(byte_of(bytes, 1), byte_of(bytes, 3));
}

inline void multiply_add_bytes(int (&sums)[4], const unsigned (&rows)[4], unsigned one, unsigned two) {
  multiply_words<4>(sums, rows, one, two, byte_of);
}

}  // namespace quire
