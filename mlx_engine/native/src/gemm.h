// Matrix products with a weight that was packed once, for the few rows of a decode step and the many of a prefill.
#pragma once

#include <cstddef>

namespace quire {

// A packed weight [n, k] is ceil(n / kPanelWidth) panels, each [k, kPanelWidth], row-major, filled up with zeros. It
// starts at the first multiple of kPanelAlignment bytes of its buffer.
#if defined(__AVX512F__)
inline constexpr int kVectorWidth = 16;  // floats in a register
inline constexpr int kVectors = 2;       // registers that a row of a panel fills
inline constexpr int kMaxTileRows = 12;  // 24 of 32 registers hold sums
#elif defined(__AVX2__)
inline constexpr int kVectorWidth = 8;
inline constexpr int kVectors = 2;
inline constexpr int kMaxTileRows = 6;  // 12 of 16
#else
inline constexpr int kVectorWidth = 4;
inline constexpr int kVectors = 4;
inline constexpr int kMaxTileRows = 5;  // 20 of NEON's 32
#endif
inline constexpr int kPanelWidth = kVectorWidth * kVectors;
inline constexpr size_t kPanelAlignment = 64;

// Floats that the buffer of a packed weight [n, k] needs, wherever it starts.
size_t packed_size(size_t n, size_t k);

// Where the panels begin in a buffer.
float* first_panel(float* buffer);
const float* first_panel(const float* buffer);

// Writes the panels of weight [n, k], row-major, into a buffer of packed_size(n, k) floats.
void pack(const float* weight, size_t n, size_t k, float* buffer);

// out [m, n] = x [m, k] times the transpose of the weight, plus bias [n] where it isn't null. All row-major, out dense,
// float32 throughout; sums run along k in order. Panels are of a weight whose first row belongs to out's first column.
void linear(const float* x, size_t m, size_t k, const float* panels, const float* bias, size_t n, float* out);

}  // namespace quire
