#include "gemm.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "thread_pool.h"

namespace quire {
namespace {

typedef float Vector __attribute__((vector_size(kVectorWidth * sizeof(float))));
typedef float UnalignedVector __attribute__((vector_size(kVectorWidth * sizeof(float)), aligned(sizeof(float))));

// Rows of a panel that are used for all tiles before the next: 24 KB with AVX-512, of a first-level cache of 32.
constexpr size_t kDepth = 192;
// Rows of x that one item of work covers: a product of a few hundred rows is split along both sides.
constexpr size_t kItemRows = 8 * kMaxTileRows;
// With more tiles than this, a panel's next part has long been read ahead by the processor itself.
constexpr size_t kPrefetchTiles = 4;

// What one tile is computed from: sums [rows, kPanelWidth] += x [rows, depth] times panel [depth, kPanelWidth].
struct Tile {
  const float* x;
  size_t x_stride;
  const float* panel;
  size_t depth;
  const float* bias;  // [kPanelWidth] or null; read by the first part along k only
  bool first;         // sums begin at the bias instead of at what out holds
  const float* prefetch;  // the panel's next part
  float* out;
  size_t out_stride;
};

template <int Rows, bool Prefetch>
void compute_tile(const Tile& tile) {
  Vector sums[Rows][kVectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      if (!tile.first) {
        sums[r][v] = *reinterpret_cast<const UnalignedVector*>(tile.out + r * tile.out_stride + v * kVectorWidth);
      } else if (tile.bias != nullptr) {
        sums[r][v] = *reinterpret_cast<const UnalignedVector*>(tile.bias + v * kVectorWidth);
      } else {
        sums[r][v] = Vector{};
      }
    }
  }
  const float* x = tile.x;
  const size_t stride = tile.x_stride;
  const float* panel = tile.panel;
  const float* prefetch = tile.prefetch;
  for (size_t i = 0; i < tile.depth; ++i) {
    Vector weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = *reinterpret_cast<const Vector*>(panel + v * kVectorWidth);
    }
    panel += kPanelWidth;
    if constexpr (Prefetch) {
      for (int byte = 0; byte < kPanelWidth * int(sizeof(float)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(prefetch) + byte, 0, 2);
      }
      prefetch += kPanelWidth;
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const float factor = x[r * stride + i];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] += factor * weights[v];
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<UnalignedVector*>(tile.out + r * tile.out_stride + v * kVectorWidth) = sums[r][v];
    }
  }
}

using TileFunction = void (*)(const Tile&);

template <bool Prefetch, size_t... Index>
constexpr std::array<TileFunction, sizeof...(Index)> tile_functions(std::index_sequence<Index...>) {
  return {compute_tile<int(Index) + 1, Prefetch>...};
}

// By rows less one.
constexpr auto kTiles = tile_functions<false>(std::make_index_sequence<kMaxTileRows>());
constexpr auto kPrefetchingTiles = tile_functions<true>(std::make_index_sequence<kMaxTileRows>());

// out [m, kPanelWidth] from x [m, k] and one panel. The rows are split into tiles as even as they can be.
void multiply_panel(const float* x, size_t m, size_t k, const float* panel, const float* bias, float* out,
                    size_t out_stride) {
  const size_t num_tiles = (m + kMaxTileRows - 1) / kMaxTileRows;
  const size_t rows = m / num_tiles;
  const size_t longer = m % num_tiles;
  for (size_t start = 0; start < k; start += kDepth) {
    const size_t depth = std::min(kDepth, k - start);
    // Past this panel lies the next; past the last one a prefetch does nothing.
    const float* next = panel + (start + kDepth) * kPanelWidth;
    size_t row = 0;
    for (size_t t = 0; t < num_tiles; ++t) {
      const size_t tile_rows = rows + (t < longer ? 1 : 0);
      const bool prefetch = t + 1 == num_tiles && num_tiles <= kPrefetchTiles;
      const auto function = (prefetch ? kPrefetchingTiles : kTiles)[tile_rows - 1];
      function({x + row * k + start, k, panel + start * kPanelWidth, depth, bias, start == 0, next,
                out + row * out_stride, out_stride});
      row += tile_rows;
    }
  }
}

// The same where fewer than kPanelWidth columns are wanted.
void multiply_last_panel(const float* x, size_t m, size_t k, const float* panel, const float* bias, size_t columns,
                         float* out, size_t out_stride) {
  alignas(kPanelAlignment) float padded_bias[kPanelWidth] = {};
  if (bias != nullptr) {
    std::copy_n(bias, columns, padded_bias);
  }
  alignas(kPanelAlignment) float sums[kItemRows * kPanelWidth];
  multiply_panel(x, m, k, panel, bias == nullptr ? nullptr : padded_bias, sums, kPanelWidth);
  for (size_t row = 0; row < m; ++row) {
    std::copy_n(sums + row * kPanelWidth, columns, out + row * out_stride);
  }
}

size_t num_panels(size_t n) { return (n + kPanelWidth - 1) / kPanelWidth; }

}  // namespace

size_t packed_size(size_t n, size_t k) { return num_panels(n) * kPanelWidth * k + kPanelAlignment / sizeof(float); }

float* first_panel(float* buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  return buffer + ((kPanelAlignment - address % kPanelAlignment) % kPanelAlignment) / sizeof(float);
}

const float* first_panel(const float* buffer) { return first_panel(const_cast<float*>(buffer)); }

void pack(const float* weight, size_t n, size_t k, float* buffer) {
  float* panels = first_panel(buffer);
  ThreadPool::instance().parallel_for(num_panels(n), [=](uint32_t p) {
    float* panel = panels + p * kPanelWidth * k;
    const size_t first = size_t(p) * kPanelWidth;
    const size_t columns = std::min<size_t>(kPanelWidth, n - first);
    for (size_t i = 0; i < k; ++i) {
      for (size_t column = 0; column < columns; ++column) {
        panel[i * kPanelWidth + column] = weight[(first + column) * k + i];
      }
      std::fill(panel + i * kPanelWidth + columns, panel + (i + 1) * kPanelWidth, 0.0f);
    }
  });
}

void linear(const float* x, size_t m, size_t k, const float* panels, const float* bias, size_t n, float* out) {
  if (m == 0 || n == 0) {
    return;
  }
  // Neighbouring items share a panel, so that it is still in a cache.
  const size_t row_items = (m + kItemRows - 1) / kItemRows;
  ThreadPool::instance().parallel_for(num_panels(n) * row_items, [=](uint32_t item) {
    const size_t p = item / row_items;
    const size_t row = item % row_items * kItemRows;
    const size_t rows = std::min(kItemRows, m - row);
    const size_t column = p * kPanelWidth;
    const float* panel = panels + column * k;
    const float* panel_bias = bias == nullptr ? nullptr : bias + column;
    float* panel_out = out + row * n + column;
    if (column + kPanelWidth <= n) {
      multiply_panel(x + row * k, rows, k, panel, panel_bias, panel_out, n);
    } else {
      multiply_last_panel(x + row * k, rows, k, panel, panel_bias, n - column, panel_out, n);
    }
  });
}

}  // namespace quire
