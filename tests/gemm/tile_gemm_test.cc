// The kernel for tile registers, on every processor: on an emulation of its instructions, and where
// there is AMX on both.
#include "gemm/cpu/tile_gemm.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "gemm/cpu/tile_kernel.h"
#include "tandem/random.h"

namespace tandem {
namespace {

/// TDPBF16PS as Intel's manual defines it; it flushes subnormals, of which these tests have none.
struct EmulatedTiles {
  static inline thread_local char registers[8][16][64];
  static inline thread_local bool configured = false;
  static void begin() { configured = true; }
  static void end() { configured = false; }
  template <int kTile>
  static void zero() {
    EXPECT_TRUE(configured);
    std::memset(registers[kTile], 0, sizeof registers[kTile]);
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    for (int64_t row = 0; row < 16; ++row) {
      std::memcpy(registers[kTile][row], static_cast<const char*>(from) + row * stride, 64);
    }
  }
  template <int kTile>
  static void store(void* to) {
    std::memcpy(to, registers[kTile], sizeof registers[kTile]);
  }
  template <int kSums, int kA, int kB>
  static void multiply() {
    BFloat16 a[16][32], b[16][32];
    float sums[16][16];
    std::memcpy(static_cast<void*>(a), registers[kA], sizeof a);
    std::memcpy(static_cast<void*>(b), registers[kB], sizeof b);
    std::memcpy(sums, registers[kSums], sizeof sums);
    for (int i = 0; i < 16; ++i) {
      float even[16] = {}, odd[16] = {};
      for (int pair = 0; pair < 16; ++pair) {
        for (int j = 0; j < 16; ++j) {
          even[j] = std::fma(a[i][2 * pair].to_float(), b[pair][2 * j].to_float(), even[j]);
          odd[j] = std::fma(a[i][2 * pair + 1].to_float(), b[pair][2 * j + 1].to_float(), odd[j]);
        }
      }
      for (int j = 0; j < 16; ++j) sums[i][j] += even[j] + odd[j];
    }
    std::memcpy(registers[kSums], sums, sizeof sums);
  }
};

/// Element [i, j] as the kernel defines it: steps of 32 k in order, each the sum of its even and of
/// its odd k.
float defined(const std::vector<BFloat16>& a, const std::vector<BFloat16>& b, int64_t i, int64_t j,
              int64_t k) {
  float sum = 0;
  for (int64_t step = 0; step < k; step += 32) {
    float sums[2] = {};
    for (int64_t p = step; p < std::min(k, step + 32); ++p) {
      float& half = sums[p % 2];
      half = std::fma(a[size_t(i * k + p)].to_float(), b[size_t(j * k + p)].to_float(), half);
    }
    sum += sums[0] + sums[1];
  }
  return sum;
}

struct Stored {
  Memory memory;
  Tensor tensor;
  /// [rows, columns] of `values`, which are [rows][columns], stored by columns if `transposed`.
  Stored(const std::vector<BFloat16>& values, int64_t rows, int64_t columns, bool transposed)
      : memory(size_t(rows * columns) * sizeof(BFloat16)) {
    tensor = transposed ? memory.view(DType::bf16, {columns, rows}).transposed()
                        : memory.view(DType::bf16, {rows, columns});
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        tensor.as<BFloat16>()[i * tensor.stride(0) + j * tensor.stride(1)] =
            values[size_t(i * columns + j)];
      }
    }
  }
};

std::vector<BFloat16> random_values(int64_t count, uint64_t seed) {
  std::vector<BFloat16> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(BFloat16::from_float(normal(seed, 0, uint64_t(i))));
  }
  return values;
}

using Gemm = void (*)(const Tensor&, const Tensor&, const Tensor&, const GemmOptions&);

/// Checks all layouts, dtypes of the result, bias and accumulation of one shape.
void check_shape(int64_t m, int64_t n, int64_t k, Gemm gemm) {
  const std::vector<BFloat16> a = random_values(m * k, 1), b = random_values(n * k, 2);
  std::vector<BFloat16> b_rows(b.size());
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t p = 0; p < k; ++p) b_rows[size_t(p * n + j)] = b[size_t(j * k + p)];
  }
  std::vector<float> products;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) products.push_back(defined(a, b, i, j, k));
  }
  for (int options = 0; options < 32; ++options) {
    SCOPED_TRACE(fmt::format("m {} n {} k {} options {}", m, n, k, options));
    const Stored left(a, m, k, options & 1), right(b_rows, k, n, options & 2);
    const DType dtype = options & 4 ? DType::f32 : DType::bf16;
    const bool with_bias = options & 8, accumulate = options & 16;
    const Memory memory(size_t(m * n) * size_of(dtype)), bias(size_t(n) * size_of(dtype));
    const Tensor out = memory.view(dtype, {m, n}), row = bias.view(dtype, {n});
    const auto at = [](const Tensor& t, int64_t i) {
      return t.dtype() == DType::f32 ? t.as<float>()[i] : t.as<BFloat16>()[i].to_float();
    };
    const auto set = [](const Tensor& t, int64_t i, float value) {
      if (t.dtype() == DType::f32)
        t.as<float>()[i] = value;
      else
        t.as<BFloat16>()[i] = BFloat16::from_float(value);
    };
    for (int64_t j = 0; j < n; ++j) set(row, j, normal(3, 0, uint64_t(j)));
    std::vector<float> expected;
    for (int64_t i = 0; i < m * n; ++i) {
      set(out, i, normal(4, 0, uint64_t(i)));
      float sum = products[size_t(i)];
      if (with_bias) sum += at(row, i % n);
      if (accumulate) sum += at(out, i);
      expected.push_back(dtype == DType::f32 ? sum : BFloat16::from_float(sum).to_float());
    }
    gemm(left.tensor, right.tensor, out, {with_bias ? &row : nullptr, accumulate});
    for (int64_t i = 0; i < m * n; ++i) ASSERT_EQ(at(out, i), expected[size_t(i)]) << i;
  }
}

TEST(TileGemm, PacksTheSmallerOperandOrBoth) {
  const Tensor tokens(nullptr, DType::bf16, {64, 96}), weight(nullptr, DType::bf16, {160, 96}),
      dy(nullptr, DType::bf16, {64, 160});
  const auto expect = [](const PackedBytes& packed, int64_t columns, int64_t rows) {
    EXPECT_EQ(packed.columns, columns);
    EXPECT_EQ(packed.rows, rows);
  };
  expect(packed_bytes(tokens, weight.transposed()), 2 * 64 * 96, 0);
  expect(packed_bytes(dy, weight), 2 * 160 * 96, 0);
  expect(packed_bytes(dy.transposed(), tokens), 2 * 64 * 96, 2 * 64 * 160);
}

TEST(TileGemm, IsAsDefinedForEveryShape) {
  const int64_t shapes[][3] = {{1, 1, 1},     {1, 17, 31},    {2, 16, 32},  {16, 33, 64},
                               {17, 300, 70}, {33, 48, 1100}, {300, 20, 36}};
  for (const int threads : {1, 3}) {
    set_kernel_threads(threads);
    for (const auto& [m, n, k] : shapes) {
      check_shape(m, n, k, cpu::tile::gemm<EmulatedTiles>);
      if (HasFatalFailure()) return;
      if (cpu::has_tile_products()) check_shape(m, n, k, cpu::tile_gemm);
      if (HasFatalFailure()) return;
    }
  }
  set_kernel_threads(1);
}

}  // namespace
}  // namespace tandem
