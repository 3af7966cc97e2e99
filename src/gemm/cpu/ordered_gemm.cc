#include "gemm/cpu/ordered_gemm.h"

#include <oneapi/dnnl/dnnl.hpp>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "core/cpu/parallel.h"
#include "gemm/cpu/multiply_add.h"
#include "gemm/cpu/small_gemm.h"

namespace tandem::cpu {
namespace {

// b is packed in panels of 16 columns: one panel (16 KiB) stays in the L1 cache while the rows of
// a's block (96 KiB) stream past; both blocks stay in L2.
constexpr int64_t kPanel = 16, kDepth = 256, kColumns = 256, kRows = 96;

using Eight = float __attribute__((vector_size(32)));
using StoredEight =
    float __attribute__((vector_size(32), aligned(4), may_alias));  // as stored in memory

/// x[p] = element p of eight rows that are `ld` floats apart.
inline void load_transposed(const float* from, int64_t ld, Eight* x) {
  Eight y[8];
  for (int j = 0; j < 8; ++j) x[j] = *reinterpret_cast<const StoredEight*>(from + j * ld);
  for (int j = 0; j < 8; j += 2) {
    y[j] = __builtin_shufflevector(x[j], x[j + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    y[j + 1] = __builtin_shufflevector(x[j], x[j + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Eight z[8];
  for (int j = 0; j < 8; j += 4) {
    for (int i = 0; i < 2; ++i) {
      const Eight &low = y[j + i], &high = y[j + 2 + i];
      z[j + 2 * i] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
      z[j + 2 * i + 1] = __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int p = 0; p < 4; ++p) {
    x[p] = __builtin_shufflevector(z[p], z[4 + p], 0, 1, 2, 3, 8, 9, 10, 11);
    x[4 + p] = __builtin_shufflevector(z[p], z[4 + p], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

/// Packs a panel of `columns` columns of b starting at row `first`; the remaining columns are 0.
void pack_panel(const Tensor& b, int64_t first, int64_t depth, int64_t column, int64_t columns,
                float* to) {
  const float* from = b.as<float>() + first * b.stride(0) + column * b.stride(1);
  if (columns < kPanel) std::memset(to, 0, sizeof(float) * size_t(depth * kPanel));
  if (b.stride(1) == 1) {
    for (int64_t p = 0; p < depth; ++p) {
      if (columns == kPanel) {
        std::memcpy(to + p * kPanel, from + p * b.stride(0), sizeof(float) * kPanel);
      } else {
        std::copy_n(from + p * b.stride(0), columns, to + p * kPanel);
      }
    }
    return;
  }
  const int64_t ld = b.stride(1), by_eight = depth / 8 * 8;
  int64_t j = 0;
  for (; j + 8 <= columns; j += 8) {
    for (int64_t p = 0; p < by_eight; p += 8) {
      Eight x[8];
      load_transposed(from + j * ld + p, ld, x);
      for (int i = 0; i < 8; ++i) *reinterpret_cast<StoredEight*>(to + (p + i) * kPanel + j) = x[i];
    }
    for (int64_t p = by_eight; p < depth; ++p) {
      for (int64_t i = j; i < j + 8; ++i) to[p * kPanel + i] = from[i * ld + p];
    }
  }
  for (; j < columns; ++j) {
    for (int64_t p = 0; p < depth; ++p) to[p * kPanel + j] = from[j * ld + p];
  }
}

/// Buffers of one thread for the blocks that it works on.
struct Blocks {
  alignas(64) float b[kColumns * kDepth];
  alignas(64) float a[kRows * kDepth];
  alignas(64) float edge[kRows * kPanel];
};
Blocks& blocks() {
  // On the heap: thread-local storage would be part of every thread's stack.
  thread_local const auto local = std::make_unique<Blocks>();
  return *local;
}

struct Rows {
  const float* from;
  int64_t row, column;  ///< strides
};

/// Rows [first, first + rows) of a in columns [begin, begin + depth): in place, or copied if their
/// elements are not adjacent.
Rows rows_of(const Tensor& a, int64_t first, int64_t rows, int64_t begin, int64_t depth,
             float* to) {
  const float* from = a.as<float>() + first * a.stride(0) + begin * a.stride(1);
  if (a.stride(1) == 1) return {from, a.stride(0), 1};
  for (int64_t p = 0; p < depth; ++p) {
    std::memcpy(to + p * rows, from + p * a.stride(1), sizeof(float) * size_t(rows));
  }
  return {to, 1, rows};
}

/// Kernel for so few rows that b is read in place; several independent columns hide the latency of
/// an addition. Computes kGroups x 8 columns of kRowsAtOnce rows of a, starting at `out`.
template <int kRowsAtOnce, int kGroups>
void multiply_few(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
                  int64_t b_column, int64_t k, float* out, int64_t out_row, bool accumulate) {
  Eight sums[kRowsAtOnce][kGroups];
#pragma GCC unroll 2
  for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      sums[i][g] =
          accumulate ? *reinterpret_cast<const StoredEight*>(out + i * out_row + 8 * g) : Eight{};
    }
  }
  const auto add = [&](int64_t p, int g, const Eight& column) {
#pragma GCC unroll 2
    for (int i = 0; i < kRowsAtOnce; ++i) {
      sums[i][g] = multiply_add<Eight>(a[i * a_row + p * a_column], column, sums[i][g]);
    }
  };
  int64_t p = 0;
  // One cache line at a time: columns 4 KiB apart evict each other.
  for (; b_column != 1 && p + 16 <= k; p += 16) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 2
      for (int half = 0; half < 16; half += 8) {
        Eight x[8];
        load_transposed(b + 8 * g * b_column + p + half, b_column, x);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) add(p + half + i, g, x[i]);
      }
    }
  }
  for (; p < k; ++p) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      Eight x;
      const float* from = b + p * b_row + 8 * g * b_column;
      if (b_column == 1) {
        x = *reinterpret_cast<const StoredEight*>(from);
      } else {
        for (int j = 0; j < 8; ++j) x[j] = from[j * b_column];
      }
      add(p, g, x);
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      *reinterpret_cast<StoredEight*>(out + i * out_row + 8 * g) = sums[i][g];
    }
  }
}

/// Computes as many whole groups of the columns [begin, end) as fit; returns the first column left.
int64_t multiply_few(const Tensor& a, const Tensor& b, const Tensor& out, int64_t begin,
                     int64_t end, bool accumulate) {
  const int64_t n = out.dim(1);
  const auto columns = [&]<int kGroups>(std::integral_constant<int, kGroups>) {
    const auto multiply = out.dim(0) == 1 ? multiply_few<1, kGroups> : multiply_few<2, kGroups>;
    for (; begin + 8 * kGroups <= end; begin += 8 * kGroups) {
      multiply(a.as<float>(), a.stride(0), a.stride(1), b.as<float>() + begin * b.stride(1),
               b.stride(0), b.stride(1), a.dim(1), out.as<float>() + begin, n, accumulate);
    }
  };
  if (b.stride(1) == 1) columns(std::integral_constant<int, 8>());
  columns(std::integral_constant<int, 2>());
  columns(std::integral_constant<int, 1>());
  return begin;
}

/// Columns [begin, end) of rows [top, bottom) of the GEMM; added to `out` if `accumulate`.
void multiply_block(const Tensor& a, const Tensor& b, const Tensor& out, int64_t top,
                    int64_t bottom, int64_t begin, int64_t end, bool accumulate) {
  Blocks& local = blocks();
  const int64_t n = out.dim(1), k = a.dim(1);
  constexpr int64_t kFew = 16;  // too few rows to pay for copying b
  const bool in_place = b.stride(1) == 1 && out.dim(0) <= kFew;
  if (out.dim(0) <= 2) begin = multiply_few(a, b, out, begin, end, accumulate);
  for (int64_t column = begin; column < end; column += kColumns) {
    const int64_t columns = std::min(kColumns, end - column);
    for (int64_t first = 0; first < k; first += kDepth) {
      const int64_t depth = std::min(kDepth, k - first);
      for (int64_t j = 0; j < columns; j += kPanel) {
        const int64_t width = std::min(kPanel, columns - j);
        if (in_place && width == kPanel) continue;
        pack_panel(b, first, depth, column + j, width, local.b + j * depth);
      }
      for (int64_t row = top; row < bottom; row += kRows) {
        const int64_t rows = std::min(kRows, bottom - row);
        const Rows from = rows_of(a, row, rows, first, depth, local.a);
        for (int64_t j = 0; j < columns; j += kPanel) {
          float* to = out.as<float>() + row * n + column + j;
          const int64_t width = std::min(kPanel, columns - j);
          if (width == kPanel) {
            const float* panel =
                in_place ? b.as<float>() + first * b.stride(0) + column + j : local.b + j * depth;
            small_gemm(rows, kPanel, depth, from.from, from.row, from.column, panel,
                       in_place ? b.stride(0) : kPanel, to, n, accumulate || first > 0);
            continue;
          }
          for (int64_t i = 0; i < rows; ++i)
            std::copy_n(to + i * n, width, local.edge + i * kPanel);
          small_gemm(rows, kPanel, depth, from.from, from.row, from.column, local.b + j * depth,
                     kPanel, local.edge, kPanel, accumulate || first > 0);
          for (int64_t i = 0; i < rows; ++i)
            std::copy_n(local.edge + i * kPanel, width, to + i * n);
        }
      }
    }
  }
}

/// out = or += bias, in every row.
void add_bias(const Tensor& out, const Tensor& bias, bool accumulate) {
  const int64_t n = out.dim(1);
  const float* from = bias.as<float>();
  for (int64_t i = 0; i < out.dim(0); ++i) {
    float* row = out.as<float>() + i * n;
    for (int64_t j = 0; j < n; ++j) row[j] = (accumulate ? row[j] : 0.0f) + from[j];
  }
}

}  // namespace

bool has_ordered_products() {
#if defined(__AVX2__) && defined(__FMA__)
  static const bool none =
      (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) != dnnl_cpu_isa_avx512_core;
  return none;
#else
  return false;
#endif
}

void ordered_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options) {
  if (options.bias) add_bias(out, *options.bias, options.accumulate);
  const bool accumulate = options.accumulate || options.bias;
  const int64_t m = out.dim(0), n = out.dim(1), panels = (n + kPanel - 1) / kPanel;
  constexpr int64_t kMinWork = 1 << 18;  // min multiplications that are worth another thread
  const int64_t work = std::max<int64_t>(1, m * kPanel * a.dim(1));
  if (panels > 1) {
    parallel_ranges(panels, (kMinWork + work - 1) / work, [&](int64_t begin, int64_t end) {
      multiply_block(a, b, out, 0, m, begin * kPanel, std::min(end * kPanel, n), accumulate);
    });
  } else {
    parallel_ranges(m, (kMinWork * m + work - 1) / work, [&](int64_t begin, int64_t end) {
      multiply_block(a, b, out, begin, end, 0, n, accumulate);
    });
  }
}

}  // namespace tandem::cpu
