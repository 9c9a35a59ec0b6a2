// 16-bit floating-point numbers in plain C++, for running kernels on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace half_types {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  explicit bfloat16(float value) {
    const uint32_t word = float_bits(value);
    // To the nearest, ties to even.
    bits = uint16_t((word + 0x7fffu + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return float_of(uint32_t(bits) << 16); }
};

struct float16 {
  uint16_t bits;
  float16() = default;
  explicit float16(float value) {
    const uint32_t word = float_bits(value);
    const uint32_t sign = word >> 16 & 0x8000u;
    const float magnitude = std::fabs(value);
    if (!(magnitude < 65520.0f)) {
      bits = uint16_t(sign | (magnitude != magnitude ? 0x7e00u : 0x7c00u));
    } else if (magnitude < 6.103515625e-05f) {
      bits = uint16_t(sign | uint32_t(std::nearbyint(magnitude * 16777216.0f)));
    } else {
      const uint32_t rounded = (word & 0x7fffffffu) + 0xfffu + (word >> 13 & 1);
      bits = uint16_t(sign | (rounded - 0x38000000u) >> 13);
    }
  }
  explicit operator float() const {
    const float sign = bits & 0x8000u ? -1.0f : 1.0f;
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    if (exponent == 31) {
      return fraction != 0 ? NAN : sign * INFINITY;
    }
    return sign * (exponent == 0 ? std::ldexp(float(fraction), -24) : std::ldexp(float(fraction + 1024), exponent - 25));
  }
};

}  // namespace half_types
